"""Which node keeps a copy of which other node's snapshots. Knows placement and racks; knows no memory sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from service.contracts.cluster import Fleet, Node
from service.core.state import Placement
from workers.spec import ParallelLayout

Group = tuple[str, int, int]


def choose(layout: ParallelLayout, placement: Placement, fleet: Fleet) -> dict[str, str]:
    """Node id -> id of its peer, for each node of the placement that has one.

    A peer is on another node; before all else in another rack; then outside the tp, pp and dp groups of the node's
    ranks, whose loss together is likeliest; then one that trains too, and one that is nobody's peer so far.
    """
    groups = {node: _groups(layout, ranks) for node, ranks in _ranks(placement).items()}
    nodes = [node for node in fleet.nodes if node.id in groups]
    nodes += [node for node in fleet.nodes if node.id not in groups]
    load: Counter[str] = Counter()
    chosen: dict[str, str] = {}
    for place, own in enumerate(nodes[: len(groups)]):
        best, least = None, _NEVER
        for other in nodes[place + 1 :] + nodes[:place]:
            cost = _cost(own, other, groups, load)
            if cost < least:
                best, least = other, cost
            if least == _IDEAL:
                break
        if best is not None:
            chosen[own.id] = best.id
            load[best.id] += 1
    return chosen


Cost = tuple[bool, int, bool, int]  # same rack, groups in common, not of the gang, peer of how many

_IDEAL: Cost = (False, 0, False, 0)
_NEVER: Cost = (True, 1 << 30, True, 1 << 30)


def _cost(own: Node, other: Node, groups: Mapping[str, frozenset[Group]], load: Counter[str]) -> Cost:
    theirs = groups.get(other.id, frozenset())
    return (other.rack_key == own.rack_key, len(groups[own.id] & theirs), not theirs, load[other.id])


def _ranks(placement: Placement) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, slot in enumerate(placement.slots):
        ranks.setdefault(slot.node, []).append(rank)
    return ranks


def _groups(layout: ParallelLayout, ranks: list[int]) -> frozenset[Group]:
    """The tp, dp and pp groups of these ranks, each known by its axis and the other coordinates."""
    places = [layout.coordinates(rank) for rank in ranks]
    return frozenset(group for pp, dp, tp in places for group in (("tp", pp, dp), ("dp", pp, tp), ("pp", dp, tp)))
