"""Useful time over elapsed time, as a job's user sees it."""

from __future__ import annotations


def goodput(productive_s: float, submitted_at: float, end: float) -> float:
    """Own time of each step, counted once, over end minus submission; in [0, 1]. Times are Unix seconds."""
    elapsed = end - submitted_at
    return min(1.0, max(0.0, productive_s / elapsed)) if elapsed > 0 else 0.0
