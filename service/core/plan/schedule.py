"""A pipeline schedule's seconds and the micro-batches it keeps in flight. Knows ranks' times, not what they do.

The waiting is as the schedules' authors have it, with forward and the two backward passes of their own lengths and
ranks that differ: a slowest rank sets the pace, the others' first and last micro-batches fill and drain the pipeline.
Equal passes and ranks give `workers.bubble.fraction`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from service.core.plan.layout import Layout


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Of one micro-batch on one rank, all its stages together."""

    forward: float
    inputs: float  # recomputation included
    weights: float

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


def waiting_s(layout: Layout, times: Sequence[Times], micro_batches: int) -> float:
    """What the slowest rank waits in a step, sending apart."""
    p, v, m = layout.pp, layout.vpp, micro_batches
    if p == 1:
        return 0.0
    totals = [rank.total for rank in times]
    others = sum(totals) - max(totals)
    mean = others / (p - 1)
    weights = sum(rank.weights for rank in times) / p
    match layout.schedule:
        case "gpipe" | "1f1b":
            return others
        case "interleaved_1f1b":
            return others / v
        case "interleaved_zb" | "zb1":
            return (p - 1) * max(0.0, mean - 2 * weights) / v
        case "zb2":
            return (p - 1) * max(0.0, mean - 3 * weights) / 2
        case "zbv":
            return max(0, 2 * p - 1 - m) * mean / 3
        case "dualpipe":
            forward = sum(rank.forward for rank in times) / p
            return (p / 2 - 1) * max(0.0, 2 * mean - forward - 3 * weights)


def sends(layout: Layout, micro_batches: int) -> tuple[float, float]:
    """Sends, there and back, that a rank waits for while it works, and those while the pipeline fills and drains."""
    if layout.pp == 1:
        return 0.0, 0.0
    v = 1 if layout.schedule in ("zb1", "zb2", "dualpipe") else layout.vpp
    return 2.0 * v * micro_batches, 2.0 * (layout.pp - 1)


def in_flight(layout: Layout, rank: int, micro_batches: int) -> float:
    """Micro-batches whose activations a rank keeps at once, of all its layers."""
    p, v, m = layout.pp, layout.vpp, micro_batches
    if p == 1:
        return 1.0
    match layout.schedule:
        case "gpipe":
            return float(m)
        case "1f1b" | "zb1":
            return float(min(m, p - rank))
        case "zb2":
            return float(min(m, 2 * (p - rank) - 1)) if rank else float(min(m, 2 * p - 1))
        case "interleaved_1f1b" | "interleaved_zb":
            return min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1) / v
        case "zbv":
            return min(float(m), float(p))
        case "dualpipe":
            return min(float(m), p + 1.0)
