"""How long the parts of a step take each rank, as means over windows: what is kept of what ranks say of it.

Ranks say it step by step, and their agents pass on the newest each time: a window's mean is over some of its steps.
"""

from __future__ import annotations

from typing import Any

from workers.reports import Moved

WINDOW_S = 10.0
RANKS_A_SECOND = 64  # that are written: windows of large gangs are longer


class Times:
    """Of one attempt."""

    def __init__(self, world: int) -> None:
        self.world, self.window_s = world, max(WINDOW_S, world / RANKS_A_SECOND)
        self.since: float | None = None
        self.step, self.heard = 0, dict[int, list[dict[str, float]]]()  # of this window

    def add(self, moved: Moved) -> None:
        if moved.parts is None:
            return
        self.step = max(self.step, moved.step)
        known = self.heard.setdefault(moved.rank, [])
        known.append(moved.parts if moved.pulse_s is None else {**moved.parts, "pulse": moved.pulse_s})

    def due(self, at: float) -> dict[str, Any] | None:
        """At the end of a window in which something was said: its last step, and of each part seconds by rank; None of
        a rank that said nothing. `pulse`: of a small piece of work, the same for all."""
        if self.since is None:
            self.since = at
        if at - self.since < self.window_s or not self.heard:
            return None
        names = sorted({name for said in self.heard.values() for parts in said for name in parts})
        parts = {name: [self._mean(rank, name) for rank in range(self.world)] for name in names}
        told = {"step": self.step, "parts": parts}
        self.since, self.step, self.heard = at, 0, {}
        return told

    def _mean(self, rank: int, name: str) -> float | None:
        said = [parts[name] for parts in self.heard.get(rank, ()) if name in parts]
        return float(f"{sum(said) / len(said):.4g}") if said else None
