"""The bubble of a pipeline schedule: the share of a step in which a pipeline rank waits for others. Theory, no torch.

A step is the longest of the ranks' times, each from its first pass to its last. Sending is free, stages are equal, and
passes forward, back to the inputs and back to the weights take the same time. `tests/bench/bubble.py` measures it.
"""

from __future__ import annotations

from workers.spec import ParallelLayout


def fraction(layout: ParallelLayout, micro_batches: int) -> float:
    """Waiting / (work + waiting) in a step of a replica that runs `micro_batches`, as the schedule's authors have it.

    With p ranks, m micro-batches and v stages a rank:

    - gpipe, 1f1b: (p - 1) / (m + p - 1). GPipe (arXiv 1811.06965), section 2.3; Megatron-LM (2104.04473), section 2.2.
    - interleaved_1f1b: a stage is 1/v of its rank, and so is the waiting: (p - 1) / (v m + p - 1). Megatron-LM again.
    - interleaved_zb: a third of that, (p - 1) / (3 v m + p - 1), since passes to the weights fill the rest. Zero Bubble
      (2401.10241), ZB-H1: (p - 1) (F + B - W) of waiting; the authors have it for v = 1.
    - zbv: none from m = 2 p - 1 on. Zero Bubble, section 6, for many micro-batches; each one that is missing costs a
      pass, which is read off torch's schedule.
    """
    p, m, v = layout.pp, micro_batches, layout.vpp
    match layout.schedule:
        case "gpipe" | "1f1b":
            waiting, work = p - 1, m
        case "interleaved_1f1b":
            waiting, work = p - 1, v * m
        case "interleaved_zb":
            waiting, work = p - 1, 3 * v * m
        case "zbv":
            waiting, work = max(0, 2 * p - 1 - m), 3 * m
    return waiting / (work + waiting)
