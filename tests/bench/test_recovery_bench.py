"""What a fault cost, from the steps that were completed before it and after. What is measured is not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import recovery, recovery_fault, recovery_rank
from tests.bench.recovery_fault import Done

pytestmark = pytest.mark.torch


def attempts(*lengths: tuple[int, int]) -> list[Done]:
    """Attempts of (first step, last step), a second a step."""
    steps = [(step, number) for number, (first, last) in enumerate(lengths, 1) for step in range(first, last + 1)]
    return [Done(step, attempt, float(at)) for at, (step, attempt) in enumerate(steps)]


COSTS = (
    # attempts, the broken one, first new step and when, steps redone
    ([(1, 15), (11, 16)], 1, (16, 20.0), 5),
    ([(1, 15), (16, 18)], 1, (16, 15.0), 0),
    ([(1, 15), (11, 15)], 1, None, 5),
    ([(1, 15)], 1, None, 0),
    ([(1, 15), (11, 13), (11, 16)], 1, (16, 23.0), 8),
    ([(1, 15), (11, 25), (21, 26)], 2, (26, 35.0), 5),
)


@pytest.mark.parametrize(("told", "broken", "first", "redone"), COSTS)
def test_what_is_new_and_what_is_done_again(
    told: list[tuple[int, int]], broken: int, first: tuple[int, float] | None, redone: int
) -> None:
    steps = attempts(*told)
    new = recovery_fault.new_step(steps, broken)
    assert (new and (new.step, new.at)) == first
    assert recovery_fault.again(steps, broken) == redone


@pytest.mark.parametrize(
    ("told", "expected"), [([], False), ([(1, 9)], False), ([(1, 10)], True), ([(1, 30), (21, 27)], False)]
)
def test_when_a_training_may_be_broken(told: list[tuple[int, int]], expected: bool) -> None:
    assert recovery_fault.steady(attempts(*told)) is expected


@pytest.mark.parametrize(
    ("last", "late_s", "wait_s"),
    [(15, 0.0, 0.5), (13, 1.0, 1.5), (25, 0.25, 0.25), (15, 0.75, 0.0), (11, 0.0, 0.0), (16, 0.0, 0.0)],
)
def test_how_far_it_is_to_the_middle_of_a_step_between_two_checkpoints(last: int, late_s: float, wait_s: float) -> None:
    steps = attempts((1, last))
    assert recovery_fault.to_middle(steps, steps[-1].at + late_s) == wait_s


def test_a_trail_of_two_attempts_and_a_line_that_is_being_written(tmp_path: Path) -> None:
    lines = [
        {"report": "Born", "rank": 5, "pid": 7, "node": "a"},
        {"report": "Resumed", "step": 0},
        {"report": "StepDone", "step": 1, "at": 2.0},
        {"report": "Born", "rank": 5, "pid": 8, "node": "b"},
        {"report": "Resumed", "step": 0},
        {"report": "StepDone", "step": 1, "at": 4.0},
    ]
    (tmp_path / "trail").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"report": "StepD')
    assert recovery_rank.steps(tmp_path) == [Done(1, 1, 2.0), Done(1, 2, 4.0)]
    assert recovery_rank.newest(tmp_path, 5) == (8, "b")


def test_ratios_are_ours_over_theirs() -> None:
    def runs(*seconds: float) -> list[dict[str, float]]:
        return [{"recover_s": each, "steps_redone": 5, "step_s": 0.5, "load": 1.0} for each in seconds]

    found = recovery.figures({
        "ours": {"rank": runs(1, 2, 9), "node": runs(4)},
        "ray": {"rank": runs(20, 10, 30), "node": runs(40)},
        "torchrun": {"rank": runs(8), "node": runs(16)},
    })  # fmt: skip
    assert (found["rank_recover_s"], found["node_recover_s"]) == (2, 4)
    assert (found["vs_ray_train_rank"], found["vs_ray_train_node"]) == (0.1, 0.1)
    assert (found["vs_torchrun_rank"], found["vs_torchrun_node"]) == (0.25, 0.25)
    assert found["ray_train_rank_recover_s"] == 20
