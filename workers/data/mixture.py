"""Which source each sample of a mixture comes from: a pure function of (seed, number of the sample), of any number.

Every PERIOD samples have exactly as many of each source as its weight says, rounded once, in an order that belongs to
(seed, period). So a source's cursor at sample n is known without a look at those before, in any layout.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from workers.data import order

PERIOD = 4096


class Mixture:
    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.counts = counts(weights)
        self.ends = np.cumsum(self.counts)
        self.seed = seed
        self._period = functools.lru_cache(maxsize=8)(self._arranged)

    def take(self, cursor: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the samples number `cursor` and on: the source of each, and its number there; int64 [count]."""
        sources, positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        done = 0
        while done < count:
            period, first = divmod(cursor + done, PERIOD)
            some = slice(first, min(PERIOD, first + count - done))
            source, before = self._period(period)
            sources.append(source[some])
            positions.append(period * self.counts[source[some]] + before[some])
            done += some.stop - some.start
        return np.concatenate(sources), np.concatenate(positions)

    def cursors(self, cursor: int) -> list[int]:
        """How many samples of each source are among the first `cursor`."""
        period, rest = divmod(cursor, PERIOD)
        source, _ = self._period(period)
        within = np.bincount(source[:rest], minlength=len(self.counts))
        return [int(one) for one in period * self.counts + within]

    def _arranged(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each place in a period: its source, and how many of that source come before it; int64 [PERIOD]."""
        places = np.arange(PERIOD, dtype=np.uint64)
        shuffled = order.permuted(self.seed, np.full(PERIOD, period, dtype=np.uint64), places, PERIOD)
        source = np.searchsorted(self.ends, shuffled.astype(np.int64), side="right")
        before = np.empty(PERIOD, dtype=np.int64)
        for one in range(len(self.counts)):
            own = source == one
            before[own] = np.arange(int(own.sum()))
        return source, before


def counts(weights: Sequence[float]) -> np.ndarray:
    """Of PERIOD samples, how many each source gives, int64: by largest remainders, and one at least."""
    shares = np.array(weights, dtype=np.float64) / sum(weights) * PERIOD
    found = np.maximum(1, np.floor(shares)).astype(np.int64)
    by_rest = np.argsort(found - shares, kind="stable")
    for one in by_rest[: max(0, PERIOD - int(found.sum()))]:
        found[one] += 1
    while found.sum() > PERIOD:  # so many have less than one
        found[np.argmax(found)] -= 1
    return found
