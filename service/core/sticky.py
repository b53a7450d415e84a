"""The same ranks on the same slots again, as far as those are left: what was kept there is warm.

A lost node's ranks go to one other node as a block, a spare one before any other, so that groups which stood in a node
stand in a node. What breaks a rule of placement, or makes more pipelines cross racks than it must, is placed freely; so
is another layout, on the kept nodes where they have room for it. Knows no jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from service.contracts.cluster import Fleet, Node
from service.contracts.errors import PlacementRefused
from service.contracts.job import PlacementPolicy
from service.core import placement
from service.core.state import Placement, Slot
from workers.spec import ParallelLayout

Taken = Set[tuple[str, int]]


def place(
    layout: ParallelLayout,
    fleet: Fleet,
    taken: Taken,
    policy: PlacementPolicy,
    device: str,
    speeds: Mapping[str, float] | None,
    kept: Placement | None,
    same: bool,
) -> Placement:
    """As `placement.place`, near what is `kept`; with `same` that was of this layout. Kept spares stay."""
    if kept is None:
        return placement.place(layout, fleet, taken, policy, device, speeds)
    again = _again(kept, fleet, taken, device) if same else None
    if again is not None and placement.problem(layout, again, fleet, policy) is None:
        whole = again == kept.slots
        if whole or _crossing(layout, again, fleet) <= _crossing_freely(layout, fleet, taken, policy, device, speeds):
            return _with_spares(again, kept, fleet, taken)
    free = _near(layout, fleet, taken, policy, device, speeds, kept)
    return _with_spares(free.slots, kept, fleet, taken)


def whole(kept: Placement, fleet: Fleet, taken: Taken) -> Placement | None:
    """What is kept, taken again to the last slot; None where a node or slot of it is lost."""
    alive = {node.id for node in fleet.nodes}
    if any(slot.node not in alive or (slot.node, slot.index) in taken for slot in kept.slots):
        return None
    return _with_spares(kept.slots, kept, fleet, taken)


def _again(kept: Placement, fleet: Fleet, taken: Taken, device: str) -> tuple[Slot, ...] | None:
    """The kept slots with those of lost nodes replaced; None where no node has room for a lost node's ranks."""
    alive = {node.id: node for node in fleet.nodes if node.device == device}
    slots = list(kept.slots)
    lost: dict[str, list[int]] = {}
    used = set(taken)
    for rank, slot in enumerate(slots):
        if slot.node in alive and (slot.node, slot.index) not in taken:
            used.add((slot.node, slot.index))
        else:
            lost.setdefault(slot.node, []).append(rank)
    if not lost:
        return kept.slots
    spare = {slot.node: place for place, slot in enumerate(kept.spares)}
    stood = {slot.node for slot in kept.slots}
    order = sorted(alive.values(), key=lambda node: (spare.get(node.id, len(spare)), node.id in stood))
    for ranks in lost.values():
        block = _block(order, len(ranks), used)
        if block is None:
            return None
        used |= {(slot.node, slot.index) for slot in block}
        for rank, slot in zip(ranks, block, strict=True):
            slots[rank] = slot
    return tuple(slots)


def _block(nodes: Sequence[Node], size: int, used: Taken) -> list[Slot] | None:
    for node in nodes:
        free = [Slot(node.id, node.name, index) for index in range(node.slots) if (node.id, index) not in used]
        if len(free) >= size:
            return free[:size]
    return None


def _near(
    layout: ParallelLayout,
    fleet: Fleet,
    taken: Taken,
    policy: PlacementPolicy,
    device: str,
    speeds: Mapping[str, float] | None,
    kept: Placement,
) -> Placement:
    """On the kept nodes alone, else on these before all others."""
    held = {slot.node for slot in kept.held}
    near = tuple(node for node in fleet.nodes if node.id in held)
    if near and sum(node.slots for node in near) >= layout.world:
        try:
            return placement.place(layout, Fleet(near), taken, policy, device, speeds)
        except PlacementRefused:
            pass
    others = tuple(node for node in fleet.nodes if node.id not in held)
    return placement.place(layout, Fleet(near + others), taken, policy, device, speeds)


def _crossing(layout: ParallelLayout, slots: Sequence[Slot], fleet: Fleet) -> int:
    """Pipelines that stand in more than one rack."""
    racks = {node.id: node.rack_key for node in fleet.nodes}
    stood: dict[tuple[int, int], set[str]] = {}
    for rank, slot in enumerate(slots):
        _, dp, tp = layout.coordinates(rank)
        stood.setdefault((dp, tp), set()).add(racks[slot.node])
    return sum(len(racks) > 1 for racks in stood.values())


def _crossing_freely(
    layout: ParallelLayout,
    fleet: Fleet,
    taken: Taken,
    policy: PlacementPolicy,
    device: str,
    speeds: Mapping[str, float] | None,
) -> int:
    if policy.pp == "any" or layout.pp == 1:
        return layout.world
    try:
        return _crossing(layout, placement.place(layout, fleet, taken, policy, device, speeds).slots, fleet)
    except PlacementRefused:
        return layout.world


def _with_spares(slots: tuple[Slot, ...], kept: Placement, fleet: Fleet, taken: Taken) -> Placement:
    """Those of the kept spares that no rank stands on, and that are still there."""
    alive, used = {node.id for node in fleet.nodes}, {slot.node for slot in slots}
    left = (slot for slot in kept.spares if slot.node in alive and slot.node not in used)
    return Placement(slots, tuple(slot for slot in left if (slot.node, slot.index) not in taken))
