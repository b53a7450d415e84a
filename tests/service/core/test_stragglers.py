from __future__ import annotations

import pytest

from service.core import stragglers
from service.core.stragglers import BEATS, SLOWER, Straggler

NODES = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}


def beats(*seconds: float, count: int = BEATS) -> dict[int, list[float]]:
    return {rank: [own] * count for rank, own in enumerate(seconds)}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (beats(1.0, 1.0, 1.0, 1.0), []),
        (beats(1.0, 1.0, 2.0, 2.0), [Straggler("n1", 3, 2, 2.0)]),  # a slow node
        (beats(1.0, 3.0, 1.0, 1.0), [Straggler("n0", 1, 1, 3.0)]),  # a slow device
        (beats(1.0, 1.0, SLOWER, 1.0), [Straggler("n1", 2, 1, SLOWER)]),
        (beats(1.0, 1.0, SLOWER - 0.01, 1.0), []),
        (beats(1.0, 1.0, 9.0, 9.0, count=BEATS - 1), []),  # too early
        ({0: [1.0] * BEATS, 2: [2.0] * BEATS, 3: [2.0]}, [Straggler("n1", 2, 1, 2.0)]),
        ({0: [9.0] * 50 + [1.0] * BEATS, 2: [1.0] * BEATS}, []),  # it was slow long ago
        ({0: [1.0] * BEATS}, []),
        ({}, []),
    ],
)
def test_who_is_slower_than_the_others(given: dict[int, list[float]], found: list[Straggler]) -> None:
    assert stragglers.find(given, NODES) == found


def test_on_a_single_node_ranks_are_compared_with_each_other() -> None:
    alone = dict.fromkeys(range(4), "n0")
    assert stragglers.find(beats(1.0, 1.0, 1.0, 2.0), alone) == [Straggler("n0", 3, 1, 2.0)]


def test_some_pauses_make_no_straggler() -> None:
    given = beats(1.0, 1.0, 1.0, 1.0)
    given[3][: BEATS // 2 - 1] = [100.0] * (BEATS // 2 - 1)
    assert stragglers.find(given, NODES) == []
