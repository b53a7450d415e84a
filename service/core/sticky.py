"""The same ranks on the same slots again, as far as those are left: what was kept there is warm.

A lost node's ranks go to one other node as a block, a spare one before any other, so that groups which stood in a node
stand in a node. Where that breaks a rule of placement, or lets more pipelines cross racks than it must, the replicas
that lost a rank are placed anew. Another layout is placed freely, on the kept nodes where they have room for it. Knows
no jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.contracts.cluster import Fleet, Node
from service.contracts.errors import PlacementRefused
from service.contracts.job import PlacementPolicy
from service.core import placement
from service.core.state import Placement, Slot, Taken
from workers.spec import ParallelLayout


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
    if same and (again := _again(layout, fleet, taken, policy, device, kept)):
        return _with_spares(again, kept, fleet, taken)
    free = _near(layout, fleet, taken, policy, device, speeds, kept)
    return _with_spares(free.slots, kept, fleet, taken)


def whole(kept: Placement, fleet: Fleet, taken: Taken) -> Placement | None:
    """What is kept, taken again to the last slot; None where a node or slot of it is lost."""
    alive = {node.id for node in fleet.nodes}
    if any(slot.node not in alive or (slot.node, slot.index) in taken for slot in kept.slots):
        return None
    return _with_spares(kept.slots, kept, fleet, taken)


def _again(
    layout: ParallelLayout, fleet: Fleet, taken: Taken, policy: PlacementPolicy, device: str, kept: Placement
) -> tuple[Slot, ...] | None:
    """The kept slots, with those of lost nodes replaced; else with the replicas placed anew that lost any, where that
    lets fewer of them cross racks or a rule asks for it. None where neither can be."""
    alive = {node.id for node in fleet.nodes if node.device == device}
    lost = [rank for rank, at in enumerate(kept.slots) if at.node not in alive or (at.node, at.index) in taken]
    if not lost:
        return kept.slots
    hurt = sorted({layout.coordinates(rank)[1] for rank in lost})
    moved = _replaced(kept, lost, fleet, taken, device)
    if moved is not None and placement.problem(layout, moved, fleet, policy, hurt) is None:
        crossing = _crossing(layout, moved, fleet, hurt) if policy.pp == "prefer-rack" else 0
        if not crossing:
            return moved
    else:
        moved, crossing = None, len(hurt) + 1
    anew = _anew(layout, fleet, taken, policy, device, kept, hurt)
    if anew is not None and _crossing(layout, anew, fleet, hurt) < crossing:
        return anew
    return moved


def _replaced(kept: Placement, lost: Sequence[int], fleet: Fleet, taken: Taken, device: str) -> tuple[Slot, ...] | None:
    """None where no node has room for a lost node's ranks."""
    alive = {node.id: node for node in fleet.nodes if node.device == device}
    slots, gone = list(kept.slots), set(lost)
    used = taken | {(slot.node, slot.index) for rank, slot in enumerate(slots) if rank not in gone}
    blocks: dict[str, list[int]] = {}
    for rank in lost:
        blocks.setdefault(slots[rank].node, []).append(rank)
    spare = {slot.node: place for place, slot in enumerate(kept.spares)}
    stood = {slot.node for slot in kept.slots}
    order = sorted(alive.values(), key=lambda node: (spare.get(node.id, len(spare)), node.id in stood))
    for ranks in blocks.values():
        block = _block(order, len(ranks), used)
        if block is None:
            return None
        used |= {(slot.node, slot.index) for slot in block}
        for rank, slot in zip(ranks, block, strict=True):
            slots[rank] = slot
    return tuple(slots)


def _anew(
    layout: ParallelLayout,
    fleet: Fleet,
    taken: Taken,
    policy: PlacementPolicy,
    device: str,
    kept: Placement,
    hurt: Sequence[int],
) -> tuple[Slot, ...] | None:
    """With these replicas on slots that the others leave."""
    fewer = layout.model_copy(update={"dp": len(hurt), "replica_weights": None})
    replicas = [layout.coordinates(rank)[1] for rank in range(layout.world)]
    others = {(at.node, at.index) for dp, at in zip(replicas, kept.slots, strict=True) if dp not in hurt}
    try:
        found = iter(placement.place(fewer, fleet, taken | others, policy, device).slots)
    except PlacementRefused:
        return None
    return tuple(next(found) if dp in hurt else at for dp, at in zip(replicas, kept.slots, strict=True))


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
    own = {node.id for node in near}
    if sum(node.slots for node in near) - sum(node in own for node, _ in taken) >= layout.world:
        try:
            return placement.place(layout, Fleet(near), taken, policy, device, speeds)
        except PlacementRefused:
            pass
    others = tuple(node for node in fleet.nodes if node.id not in held)
    return placement.place(layout, Fleet(near + others), taken, policy, device, speeds)


def _crossing(layout: ParallelLayout, slots: Sequence[Slot], fleet: Fleet, replicas: Sequence[int]) -> int:
    """How many of these stand in more than one rack."""
    racks = {node.id: node.rack_key for node in fleet.nodes}
    return sum(len({racks[slots[rank].node] for rank in placement.ranks(layout, dp)}) > 1 for dp in replicas)


def _with_spares(slots: tuple[Slot, ...], kept: Placement, fleet: Fleet, taken: Taken) -> Placement:
    """Those of the kept spares that no rank stands on, and that are still there."""
    alive, used = {node.id for node in fleet.nodes}, {slot.node for slot in slots}
    left = (slot for slot in kept.spares if slot.node in alive and slot.node not in used)
    return Placement(slots, tuple(slot for slot in left if (slot.node, slot.index) not in taken))
