"""When a snapshot pays, and that all ranks think so alike."""

from __future__ import annotations

import pytest

from workers.checkpoint.memory import MTBF_S, Note, Rhythm, interval


@pytest.mark.parametrize(
    ("cost_s", "step_s", "devices", "steps"),
    [
        (0.0, 0.5, 8, 1),
        (0.005, 0.5, 8, 1),  # a hundredth of a step: every one
        (0.0051, 0.5, 8, 2),
        (0.5, 0.5, 8, 100),
        (5.0, 10.0, 16384, 34),  # Daly's optimum comes first: 331 s between failures of 3 hours
        (5.0, 10.0, 8, 50),
        (1.0, 0.0, 8, 1),  # nothing was measured yet
    ],
)
def test_interval(cost_s: float, step_s: float, devices: int, steps: int) -> None:
    assert interval(cost_s, step_s, devices) == steps


def test_the_mean_time_between_failures_of_a_cluster_is_as_published() -> None:
    assert 2.5 < MTBF_S / 16384 / 3600 < 3.5  # one interruption in three hours


def note(world: int, busy: float = 0.0, cost_s: float = 0.0, step_s: float = 1.0, lacking: float = 0.0) -> Note:
    return Note(busy, lacking, world * cost_s, world * step_s)


def test_rhythm() -> None:
    taken = []
    rhythm = Rhythm("auto", devices=4, last=10)
    for step in range(11, 31):
        busy, cost_s = float(step in (14, 15)), 0.0 if step < 20 else 0.05
        if rhythm.due(step, note(4, busy, cost_s)):
            taken.append(step)
    assert taken == [11, 12, 13, 16, 17, 18, 19, 24, 29]


@pytest.mark.parametrize(
    ("every", "wanted", "taken"),
    [
        (1, (), list(range(1, 13))),
        (5, (), [5, 10]),
        (5, (7,), [5, 7, 12]),  # a durable save takes one with it
        (0, (7,), []),
    ],
)
def test_a_given_rhythm(every: int, wanted: tuple[int, ...], taken: list[int]) -> None:
    rhythm = Rhythm(every, devices=4, last=0)
    assert [step for step in range(1, 13) if rhythm.due(step, note(4, cost_s=9.0), wanted=step in wanted)] == taken


def test_nothing_is_wanted_so_much_that_it_comes_before_the_last_one_is_held() -> None:
    assert not Rhythm(1, devices=4, last=0).due(5, note(4, busy=1.0), wanted=True)


def test_none_is_taken_where_some_rank_has_no_memory_for_it() -> None:
    assert not Rhythm(1, devices=4, last=0).due(5, note(4, lacking=1.0), wanted=True)
