"""Steps that are done again give what they gave: bit for bit in their layout, within rounding in one process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.pool import Pool, RankError
from tests.workers import runs
from tests.workers.test_trainer import heard, job_storage, train
from workers import rerun
from workers.parallel.precision import LossScale
from workers.reports import Report, StepDone, StepSkipped
from workers.spec import ParallelLayout, RunSpec
from workers.stretch import Redone, Stretch

pytestmark = pytest.mark.torch

STEPS = 6
Done = dict[int, tuple[float, float]]  # step -> loss, gradient norm


def run_of(layout: dict[str, object], **train: object) -> RunSpec:
    given = {"steps": STEPS, "horizon": 8, "warmup_steps": 2} | train
    return runs.spec(layout=layout, train=given, checkpoint={"every_steps": 3})


def again(store: dist.Store, rank: int, stretch: Stretch) -> list[Redone]:
    said: list[Redone] = []
    rerun.rerun(store, rank, stretch, said.append)
    return said


def stretch_of(root: Path, run: RunSpec, manifest: str | None, begin: int, last: int = STEPS) -> Stretch:
    batch = run.train.global_batch
    samples = tuple(batch * step for step in range(begin, last))
    return Stretch(run=run, job="run", root=str(root), manifest=manifest, begin=begin, samples=samples)


def redone(pool: Pool, stretch: Stretch) -> Done:
    first, *others = pool.run(stretch.run.parallel.world, again, stretch)
    assert others == [[]] * len(others)
    return {one.step: (one.loss, one.grad_norm) for one in first}


def trained(pool: Pool, root: Path, run: RunSpec) -> tuple[Done, dict[int, str]]:
    said, manifests = train(pool, root, run, 1)
    return {one.step: (one.loss, one.grad_norm) for one in heard(said, StepDone)}, manifests


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"dp": 2, "tp": 2}, {}),
        ({"dp": 2, "pp": 2}, {}),
        ({"dp": 3}, {}),
        ({"dp": 2, "pp": 2, "tp": 2}, {}),
        ({"dp": 2, "zero": 3}, {"precision": "bf16"}),
    ],
    ids=str,
)
def test_in_its_layout_a_step_is_what_it_was_bit_for_bit(pool: Pool, tmp_path: Path, layout, changes) -> None:
    run = run_of(layout, **changes)
    then, manifests = trained(pool, tmp_path, run)
    assert redone(pool, stretch_of(tmp_path, run, manifests[3], 3)) == {step: then[step] for step in (4, 5, 6)}
    assert redone(pool, stretch_of(tmp_path, run, None, 0)) == then


@pytest.mark.parametrize(("precision", "rounding"), [("float64", 1e-9), ("fp32", 1e-4)])
def test_in_one_process_it_is_what_it_was_within_rounding(
    pool: Pool, tmp_path: Path, precision: str, rounding: float
) -> None:
    run = run_of({"dp": 2, "tp": 2}, precision=precision)
    then, manifests = trained(pool, tmp_path, run)
    alone = run.model_copy(update={"parallel": ParallelLayout()})
    found = redone(pool, stretch_of(tmp_path, alone, manifests[3], 3))
    assert list(found) == [4, 5, 6]
    for step, figures in found.items():
        assert figures == pytest.approx(then[step], rel=rounding)


def test_nothing_is_written(pool: Pool, tmp_path: Path) -> None:
    run = run_of({"dp": 2})
    _, manifests = trained(pool, tmp_path, run)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    redone(pool, stretch_of(tmp_path, run, manifests[3], 3))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_samples_that_were_left_out_are_left_out(pool: Pool, tmp_path: Path) -> None:
    """A restart after step 3 left out 24 samples; a rerun is told which ones each step had."""
    run = run_of({"dp": 2})
    _, manifests = trained(pool, tmp_path, run)
    said = pool.run(2, _left_out, str(tmp_path), run, 2, (manifests[3],))
    then = {one.step: (one.loss, one.grad_norm) for one in heard(said, StepDone)}
    stretch = stretch_of(tmp_path, run, manifests[3], 3)
    stretch = stretch.model_copy(update={"samples": tuple(first + 24 for first in stretch.samples)})
    assert redone(pool, stretch) == then


def _left_out(store: dist.Store, rank: int, *given: Any) -> list[Report]:
    return runs.train(store, rank, *given, skip=(3, 24))


def test_a_loss_scale_that_was_too_high_is_lowered_as_it_was(pool: Pool, tmp_path: Path) -> None:
    run = run_of({"dp": 2}, precision="fp16")
    said = pool.run(2, _too_high, runs.train, str(tmp_path), run, 1, ())
    assert heard(said, StepSkipped)
    found, _ = pool.run(2, _too_high, again, stretch_of(tmp_path, run, None, 0))
    then = {one.step: (one.loss, one.grad_norm) for one in heard(said, StepDone)}
    assert {one.step: (one.loss, one.grad_norm) for one in found} == then


def _too_high(store: dist.Store, rank: int, then: Callable[..., Any], *given: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossScale, "FIRST", 2.0**40)
        return then(store, rank, *given)


def test_a_checkpoint_that_is_gone_or_damaged_is_said_and_the_seed_is_not_taken(pool: Pool, tmp_path: Path) -> None:
    run = run_of({"dp": 2})
    _, manifests = trained(pool, tmp_path, run)
    (shard,) = (tmp_path / "run" / "checkpoints" / f"{3:010d}").glob("*/rank-00001.bin")
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(RankError, match=r"the checkpoint of step 3 can't be loaded: rank \d: .*checksum"):
        redone(pool, stretch_of(tmp_path, run, manifests[3], 3))
    job_storage(tmp_path).delete(manifests[6])
    with pytest.raises(RankError, match=r"the checkpoint of step 6 can't be loaded: .*missing"):
        redone(pool, stretch_of(tmp_path, run, manifests[6], 6, 8))


def test_processes_of_its_own_say_a_line_a_step_or_why_not(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stretch = stretch_of(tmp_path, run_of({"dp": 2}), None, 0, 2)
    assert rerun.main(stretch.model_dump_json()) == 0
    lines = [Redone(**json.loads(line)) for line in capfd.readouterr().out.splitlines()]
    assert [one.step for one in lines] == [1, 2]
    assert all(math.isfinite(one.loss) and math.isfinite(one.grad_norm) for one in lines)
    gone = stretch.model_copy(update={"manifest": "manifests/0000000003-000001.json", "begin": 3})
    assert rerun.main(gone.model_dump_json()) == 2
    assert capfd.readouterr().err.endswith("missing\n")
