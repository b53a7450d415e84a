"""What is said of a step's speed and loss is of the world, whatever the layout and whichever rank says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.workers import runs
from workers import flops, hardware
from workers.reports import StepDone
from workers.throughput import Stopwatch, Throughput

pytestmark = pytest.mark.torch

LAYOUTS = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2-pp2-tp2": {"dp": 2, "pp": 2, "tp": 2},
    "ep2": {"dp": 2, "tp": 2, "ep": 2},
}
EXPERTS = {"experts": {"count": 4, "top_k": 2, "hidden": 16}}
STEPS = 2


def done(pool: Pool, root: Path, layout: dict[str, int], model: dict[str, Any]) -> list[StepDone]:
    run = runs.spec(layout=layout, train={"steps": STEPS}, model=model)
    said = pool.run(run.parallel.world, runs.train, str(root), run, 1, ())
    assert not [report for rank in said[1:] for report in rank if isinstance(report, StepDone)]
    return [report for report in said[0] if isinstance(report, StepDone)]


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def both(
    request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[StepDone], list[StepDone]]:
    """Of the layout, and of one process."""
    model, root = EXPERTS if "ep" in request.param else {}, tmp_path_factory.mktemp("steps")
    return done(pool, root / "many", request.param, model), done(pool, root / "one", {}, model)


@pytest.fixture
def steps(both: tuple[list[StepDone], list[StepDone]]) -> list[StepDone]:
    return both[0]


def test_T17_tokens_are_counted_once(steps: list[StepDone]) -> None:
    assert [(step.tokens, step.samples) for step in steps] == [(12 * 16, 12), (12 * 16, 24)]
    for step in steps:
        assert step.tokens_per_s == pytest.approx(step.tokens / step.step_s)


def test_T19_the_loss_is_the_true_one_where_the_last_stage_is_on_another_rank(
    both: tuple[list[StepDone], list[StepDone]],
) -> None:
    steps, alone = both
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in alone], rel=1e-9)
    assert [step.grad_norm for step in steps] == pytest.approx([step.grad_norm for step in alone], rel=1e-9)


def test_the_parts_are_the_step(steps: list[StepDone]) -> None:
    for step in steps:
        assert list(step.parts) == ["data", "forward_backward", "reduction", "optimizer"]
        assert sum(step.parts.values()) == pytest.approx(step.step_s)
        assert min(step.parts.values()) > 0


def test_a_cpu_has_no_mfu(steps: list[StepDone]) -> None:
    assert [step.mfu for step in steps] == [None] * STEPS


LLAMA = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "seq_len": 8192}


DENSE = {name: layout for name, layout in LAYOUTS.items() if "ep" not in layout}


@pytest.mark.parametrize("layout", DENSE.values(), ids=DENSE)
def test_mfu_is_of_all_ranks(layout: dict[str, int]) -> None:
    run = runs.spec(model=LLAMA, train={"precision": "bf16", "global_batch": 16}, layout=layout)
    speed, peak = Throughput.of(run, 128_256, "NVIDIA H100 80GB HBM3"), hardware.peak("H100", "bf16")
    work = 16 * 8192 * flops.per_token(run.model, 128_256, 8192)
    assert speed.mfu(10.0) == pytest.approx(work / 10.0 / (run.parallel.world * peak))
    assert Throughput.of(run, 128_256, "cpu").mfu(10.0) is None


def test_a_stopwatch_adds_up() -> None:
    watch = Stopwatch()
    for part in ("data", "forward_backward", "data"):
        watch.lap(part)
    assert list(watch.parts) == ["data", "forward_backward"]
    assert sum(watch.parts.values()) == pytest.approx(watch.total)
    watch.start()
    assert (watch.parts, watch.total) == ({}, 0.0)
