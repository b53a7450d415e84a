from __future__ import annotations

import pytest

from service.runtime.times import RANKS_A_SECOND, WINDOW_S, Times
from workers.reports import Moved


def moved(rank: int, step: int, data: float, pulse: float | None = None) -> Moved:
    return Moved(rank, "step", step, 0.0, pulse, {"data": data, "optimizer": 0.5})


def test_a_window_has_the_mean_of_each_rank_and_none_of_one_that_said_nothing() -> None:
    times = Times(3)
    assert times.due(100.0) is None
    times.add(moved(0, 7, 0.1))
    times.add(moved(0, 8, 0.3))
    times.add(moved(2, 8, 0.2, 0.01))
    times.add(Moved(1, "save", 8, 0.0))
    assert times.due(100.0 + WINDOW_S - 0.1) is None
    told = times.due(100.0 + WINDOW_S)
    assert told == {
        "step": 8,
        "parts": {"data": [0.2, None, 0.2], "optimizer": [0.5, None, 0.5], "pulse": [None, None, 0.01]},
    }


def test_nothing_is_told_of_a_window_in_which_nothing_was_said() -> None:
    times = Times(1)
    times.due(100.0)
    times.add(moved(0, 1, 0.1))
    assert times.due(120.0) is not None
    assert times.due(140.0) is None


def test_a_large_gang_has_longer_windows() -> None:
    assert Times(4096).window_s == pytest.approx(4096 / RANKS_A_SECOND)
    assert Times(8).window_s == WINDOW_S
