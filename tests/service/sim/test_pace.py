from __future__ import annotations

import pytest

from service.contracts.errors import UserError
from service.contracts.job import JobSpec
from service.sim import clock, pace
from tests.service.sim import world
from workers.spec import ParallelLayout


@pytest.mark.parametrize(
    ("full", "other", "batch", "factor"),
    [
        ({"dp": 4}, {"dp": 4}, 12, 1),
        ({"dp": 4}, {"dp": 3}, 12, 4 / 3),
        ({"dp": 4}, {"dp": 3}, 13, 5 / 4),  # the longest replica has 4 of 13, then 5
        ({"dp": 4}, {"dp": 2}, 12, 2),
        ({"dp": 4, "pp": 3}, {"dp": 3, "pp": 3}, 12, (4 + 2) / (3 + 2)),  # the bubble takes two micro-batches' time
        ({"dp": 128, "pp": 16, "tp": 8}, {"dp": 125, "pp": 16, "tp": 8}, 2048, 32 / 31),
    ],
)
def test_a_step_takes_as_long_as_the_longest_replica(full: dict, other: dict, batch: int, factor: float) -> None:
    paced = pace.Pace(ParallelLayout(**full), clock.us(10), batch)
    assert clock.seconds(paced.of(ParallelLayout(**other))) == pytest.approx(10 * factor, abs=1e-6)


def big(**fields: object) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": {"preset": "llama3-405b"},
            "data": {},
            "train": {"steps": 1, "global_batch": 2048},
            "resources": {"slots": 16384},
            **fields,
        }
    )


def test_the_estimate_of_a_large_step_is_near_what_was_published() -> None:
    """Llama 3 405B, 16M tokens a step on 16,384 H100 at 400 TFLOP/s and 41% MFU (arXiv 2407.21783, table 4)."""
    step_s = pace.estimated_s(big(), 16384, "NVIDIA H100 80GB HBM3")
    published = 6 * 405e9 * 8192 * 2048 / (16384 * 400e12)
    assert step_s == pytest.approx(published, rel=0.1)
    assert pace.copy_s(big(), 16384) == pytest.approx(405e9 * 12 / 16384 / 20e9, rel=0.01)


@pytest.mark.parametrize("spec", [big(resources={"slots": 8, "device": "cpu"}), big()])
def test_what_is_not_known_is_asked_for(spec: JobSpec) -> None:
    with pytest.raises(UserError) as caught:
        pace.estimated_s(spec, 8, "Abacus")
    assert "--step-s" in caught.value.hint


def test_a_pace_is_of_the_job_that_it_was_made_for() -> None:
    spec = world.job()
    assert pace.made(spec, ParallelLayout(dp=4), 2.5) == pace.Pace(ParallelLayout(dp=4), 2_500_000, 12)
