"""Whether a loss leaves the band of those before it. Pure: the same figures give the same answer on every rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from workers.spec import SpikeSpec

LEAST = 16  # losses, before anything is called unusual
LIKE_NORMAL = 1.4826  # times the median distance from the median: the standard deviation, where losses are normal
NARROWEST = 0.01  # of the median: a band that is narrower than noise would see spikes everywhere


def band(losses: Sequence[float], policy: SpikeSpec) -> tuple[float, float] | None:
    """(median of the recent losses, the most that is usual); None while there are too few. Both move with training, and
    no single loss moves them."""
    recent = list(losses)[-policy.window :]
    if len(recent) < LEAST:
        return None
    middle = statistics.median(recent)
    spread = LIKE_NORMAL * statistics.median(abs(loss - middle) for loss in recent)
    return middle, middle + policy.factor * max(spread, NARROWEST * abs(middle))
