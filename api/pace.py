"""How often who may ask: so many requests a second for each token, and some at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

BURST_S = 5.0  # of requests that may come at once
MOST_KNOWN = 10_000


class Pace:
    """A bucket of tokens for each name. Of one event loop."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._clock = per_s, clock
        self._left: dict[str, tuple[float, float]] = {}  # name -> (requests that it may make, when that was so)

    def wait_s(self, name: str) -> int:
        """0: it may ask now. Else whole seconds after which it may."""
        now, most = self._clock(), max(1.0, self._per_s * BURST_S)
        left, at = self._left.get(name, (most, now))
        left = min(most, left + (now - at) * self._per_s)
        if left < 1:
            return math.ceil((1 - left) / self._per_s)
        if len(self._left) >= MOST_KNOWN:
            self._left.clear()
        self._left[name] = left - 1, now
        return 0
