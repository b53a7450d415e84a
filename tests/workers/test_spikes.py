"""What counts as a spike, as figures; and a planted one in a run: found, gone back for, its samples left out."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.pool import Pool
from tests.workers import cases, runs
from workers import spikes
from workers.reports import LossSpiked, Report, ShardSaved, StepDone, StepSkipped
from workers.spec import SpikeSpec

POLICY = SpikeSpec()


def noisy(count: int, middle: float = 2.0, sigma: float = 0.02, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(middle, sigma) for _ in range(count)]


def test_of_few_losses_nothing_is_unusual() -> None:
    assert spikes.band(noisy(spikes.LEAST - 1), POLICY) is None
    assert spikes.band(noisy(spikes.LEAST), POLICY) is not None


@pytest.mark.parametrize("sigma", [0.01, 0.05, 0.2])
def test_noise_stays_in_its_band_and_a_jump_does_not(sigma: float) -> None:
    losses = noisy(2000, sigma=sigma)
    for end in range(200, 2000):
        middle, bound = spikes.band(losses[:end], POLICY)
        assert losses[end] <= bound
        assert middle + 12 * sigma + 0.2 > bound


def test_a_single_loss_moves_no_band() -> None:
    usual = spikes.band(noisy(128), POLICY)
    with_one = spikes.band([*noisy(128)[1:], 1e6], POLICY)
    assert with_one == pytest.approx(usual, rel=0.02)


def test_a_loss_that_falls_fast_is_no_spike() -> None:
    losses = [6 * math.exp(-step / 30) + 2 for step in range(300)]
    for end in range(spikes.LEAST, 300):
        assert losses[end] <= spikes.band(losses[:end], POLICY)[1]


def test_equal_losses_have_a_band_all_the_same() -> None:
    assert spikes.band([2.0] * 50, POLICY) == pytest.approx((2.0, 2.0 + 8 * 0.02))


@pytest.mark.parametrize("wrong", [{"window": 4}, {"factor": 0}, {"action": "stop"}])
def test_a_policy_that_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SpikeSpec.model_validate(wrong)


TRAIN = {"steps": 24, "global_batch": 4, "optimizer": "sgd", "learning_rate": 0.01}
SPOILED = 4 * 19 + 2  # a sample of step 20


def run_of(action: str, layout: dict[str, int]) -> Any:
    return runs.spec(
        layout=layout, train=TRAIN | {"spikes": {"action": action}}, checkpoint={"every_steps": 100}
    )  # fmt: skip


def told(said: list[Report], kind: type) -> list[Any]:
    return [report for report in said if isinstance(report, kind)]


@pytest.mark.torch
@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "pp": 2, "tp": 2}])
def test_a_planted_spike_is_gone_back_for_and_its_samples_are_left_out(
    pool: Pool, tmp_path: Path, layout: dict[str, int]
) -> None:
    run = run_of("rollback", layout)
    first, *others = pool.run(run.parallel.world, cases.spiking_run, str(tmp_path), run, SPOILED)
    (spike,) = told(first, LossSpiked)
    assert (spike.step, spike.samples) == (20, (76, 80))
    assert spike.loss > spike.bound > spike.usual
    (skipped,) = told(first, StepSkipped)
    assert (skipped.step, skipped.action, skipped.samples) == (20, "rollback", (76, 80))
    steps = [report.step for report in told(first, StepDone)]
    assert steps == [*range(1, 20), *range(1, 25)]  # nothing was published: back to the seed
    (saved,) = told(first, ShardSaved)
    assert [(entry["start"], entry["end"]) for entry in saved.header["ledger"]] == [(80, 80 + 4 * 24)]
    assert not [report for said in others for report in said if isinstance(report, LossSpiked | StepSkipped)]


@pytest.mark.torch
def test_a_planted_spike_is_told_and_the_run_goes_on(pool: Pool, tmp_path: Path) -> None:
    first, _ = pool.run(2, cases.spiking_run, str(tmp_path), run_of("log", {"dp": 2}), SPOILED)
    (spike,) = told(first, LossSpiked)
    assert spike.step == 20
    assert [report.step for report in told(first, StepDone)] == list(range(1, 25))
    quiet, _ = pool.run(2, cases.spiking_run, str(tmp_path / "off"), run_of("off", {"dp": 2}), SPOILED)
    assert told(quiet, LossSpiked) == []


@pytest.mark.torch
@pytest.mark.parametrize(("skip", "begins"), [((0, 8), 8), ((3, 8), 0)])
def test_samples_are_left_out_where_that_was_asked_for(
    pool: Pool, tmp_path: Path, skip: tuple[int, int], begins: int
) -> None:
    """After the step that it says, and after no other."""
    run = runs.spec(layout={"dp": 2}, train=TRAIN | {"steps": 2})
    first, _ = pool.run(2, runs.train_without, str(tmp_path), run, skip)
    (saved,) = told(first, ShardSaved)
    assert [(entry["start"], entry["end"]) for entry in saved.header["ledger"]] == [(begins, begins + 8)]
