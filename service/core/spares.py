"""Which nodes stand by for a job, and who gives his up. Knows slots and racks.

Spares are filled while a job runs, from what nobody waits for; who waits and could run with them gets them. A spare
node has as many free slots as the fullest node has ranks of the job, so that it can take any node's place; it is in a
rack where the job does not stand, and where no other spare is, as far as there are such.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Set

from service.contracts.cluster import Fleet, Node
from service.core.state import Job, Placement, Slot


def short(job: Job, placement: Placement) -> int:
    """How many spare nodes are missing."""
    return job.spec.resources.spares - len({slot.node for slot in placement.spares})


def left(placement: Placement, fleet: Fleet) -> Placement:
    """Without the spares on nodes that are not in `fleet`."""
    alive = {node.id for node in fleet.nodes}
    if all(slot.node in alive for slot in placement.spares):
        return placement
    return dataclasses.replace(placement, spares=tuple(slot for slot in placement.spares if slot.node in alive))


def without(placement: Placement, needed: Set[tuple[str, int]]) -> Placement:
    """Without the spare nodes of which any slot is needed."""
    nodes = {slot.node for slot in placement.spares if (slot.node, slot.index) in needed}
    if not nodes:
        return placement
    return dataclasses.replace(placement, spares=tuple(slot for slot in placement.spares if slot.node not in nodes))


def filled(job: Job, placement: Placement, fleet: Fleet, taken: Set[tuple[str, int]]) -> Placement:
    """With as many spares as there are to be had, up to what the job asks for."""
    lacking = short(job, placement)
    width = max(Counter(slot.node for slot in placement.slots).values())
    nodes = {node.id: node for node in fleet.nodes}
    used = {slot.node for slot in placement.held}
    kinds = {nodes[slot.node].accelerator for slot in placement.slots if slot.node in nodes}
    racks = Counter(nodes[node].rack_key for node in used if node in nodes)
    free = {
        node.id: slots
        for node in fleet.nodes
        if node.id not in used and node.device == job.spec.resources.device and node.accelerator in kinds
        and len(slots := _free(node, taken)) >= width
    }  # fmt: skip
    spares = list(placement.spares)
    while lacking > 0 and free:
        best = min(free, key=lambda node: racks[nodes[node].rack_key])
        spares += free.pop(best)[:width]
        racks[nodes[best].rack_key] += 1
        lacking -= 1
    return dataclasses.replace(placement, spares=tuple(spares))


def _free(node: Node, taken: Set[tuple[str, int]]) -> list[Slot]:
    return [Slot(node.id, node.name, index) for index in range(node.slots) if (node.id, index) not in taken]
