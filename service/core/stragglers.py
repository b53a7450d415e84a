"""Which ranks are slower than their peers, by what the same small piece of work takes each. Knows no steps."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

SLOWER = 1.5  # times as long as the others' median
BEATS = 8  # so many of each rank are looked at


@dataclasses.dataclass(frozen=True, slots=True)
class Straggler:
    """A node whose ranks are all slow, or one slow rank of it."""

    node: str
    rank: int  # the slowest
    ranks: int  # that are slow there
    factor: float  # of its time over what is usual


def find(beats: Mapping[int, Sequence[float]], nodes: Mapping[int, str]) -> list[Straggler]:
    """`beats`: newest seconds of each rank; a rank with fewer than BEATS of them is not judged, nor judges.

    Of each rank its median counts, since any beat may be cut short by something else. What is usual is the lower median
    of all ranks: up to half of them may be slow.
    """
    usually = {rank: statistics.median(list(own)[-BEATS:]) for rank, own in beats.items() if len(own) >= BEATS}
    if not usually:
        return []
    usual = statistics.median_low(usually.values())
    slow: dict[str, list[tuple[float, int]]] = {}
    for rank, own_s in usually.items():
        if own_s >= SLOWER * usual:
            slow.setdefault(nodes[rank], []).append((own_s / usual, rank))
    found = [Straggler(node, max(ranks)[1], len(ranks), max(ranks)[0]) for node, ranks in slow.items()]
    return sorted(found, key=lambda one: -one.factor)
