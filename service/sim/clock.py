"""Virtual time, in whole microseconds so that sums of times are exact, and an agenda of what is to happen when."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

SECOND = 1_000_000
HOUR = 3600 * SECOND
DAY = 24 * HOUR


def us(seconds: float) -> int:
    return round(seconds * SECOND)


def seconds(us: int) -> float:
    return us / SECOND


class Agenda:
    """What is to happen, in the order of time; what is for the same time, in the order it was put down."""

    def __init__(self) -> None:
        self.now = 0
        self._serial = itertools.count()
        self._heap: list[tuple[int, int, Callable[[], None]]] = []

    def at(self, when: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._serial), act))

    def after(self, wait: int, act: Callable[[], None]) -> None:
        self.at(self.now + wait, act)

    def run(self, until: int, over: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is left, `over` says so, or the time is `until`, which it is then."""
        while self._heap and self._heap[0][0] < until:
            self.now, _, act = heapq.heappop(self._heap)
            act()
            if over():
                return
        self.now = until
