"""A layout on a fleet: the slot of each rank. Knows nodes and racks; knows no jobs and no bandwidths.

A tp group stands inside one node. The stages of one replica stand in one rack, next stages on neighbouring
nodes. Replicas spread over the racks as evenly as these allow, numbered rack by rack. Nodes neighbour each
other in the order of the fleet. The same input gives the same placement.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set

from service.contracts.cluster import Fleet, Node
from service.contracts.errors import PlacementRefused
from service.contracts.job import PlacementPolicy
from service.core.state import Placement, Slot
from workers.spec import ParallelLayout

Group = Sequence[Slot]  # of one stage of one replica: tp slots
Pipeline = Sequence[Group]  # of one replica: a group for each stage


@dataclasses.dataclass(frozen=True, slots=True)
class _Room:
    """Free groups of tp slots, in physical order."""

    racks: tuple[list[Group], ...]
    astray: list[Group]  # over several racks; only where tp may leave its node
    per_node: int  # most groups in one node

    @property
    def groups(self) -> int:
        return sum(map(len, self.racks)) + len(self.astray)


def place(
    layout: ParallelLayout, fleet: Fleet, taken: Set[tuple[str, int]], policy: PlacementPolicy, device: str
) -> Placement:
    """The slot of each rank, none in `taken` (node id, device index). PlacementRefused counts what lacks."""
    nodes = [node for node in fleet.nodes if node.device == device]
    free = [(node, _free(node, taken)) for node in nodes]
    total, every = sum(len(slots) for _, slots in free), sum(node.slots for node in nodes)
    if total < layout.world:
        raise PlacementRefused(f"needs {layout.world} {device} slots; {total} of {every} are free")
    room = _room(free, layout.tp, policy)
    if room.groups < layout.dp * layout.pp:
        need = _count(layout.dp * layout.pp, layout.tp, room)
        raise PlacementRefused(
            f"needs {need}; there are {room.groups} among {total} free slots",
            hint="a smaller tp, or placement.tp: any, needs less in one node",
        )
    pipelines = list(_pipelines(layout, room, policy))
    coordinates = map(layout.coordinates, range(layout.world))
    return Placement(tuple(pipelines[dp][pp][tp] for pp, dp, tp in coordinates))


def _free(node: Node, taken: Set[tuple[str, int]]) -> list[Slot]:
    return [Slot(node.id, node.name, index) for index in range(node.slots) if (node.id, index) not in taken]


def _room(free: Sequence[tuple[Node, list[Slot]]], tp: int, policy: PlacementPolicy) -> _Room:
    racks: dict[str, list[Group]] = defaultdict(list)
    loose: dict[str, list[Slot]] = defaultdict(list)
    per_node = 0
    for node, slots in free:
        whole = len(slots) // tp * tp
        racks[node.rack_key] += _chunks(slots[:whole], tp)
        loose[node.rack_key] += slots[whole:]
        per_node = max(per_node, whole // tp)
    astray: list[Slot] = []
    if policy.tp == "any":
        for rack, slots in loose.items():
            whole = len(slots) // tp * tp
            racks[rack] += _chunks(slots[:whole], tp)
            astray += slots[whole:]
    whole = len(astray) // tp * tp if policy.pp != "rack" else 0
    return _Room(tuple(racks.values()), _chunks(astray[:whole], tp), per_node)


def _chunks(slots: list[Slot], size: int) -> list[Group]:
    return [slots[start : start + size] for start in range(0, len(slots), size)]


def _pipelines(layout: ParallelLayout, room: _Room, policy: PlacementPolicy) -> Iterator[Pipeline]:
    """dp pipelines: those inside a rack first, then, where the policy lets them, those across racks."""
    counts = [0] * len(room.racks) if policy.pp == "any" else _spread(layout, room)
    across = layout.dp - sum(counts)
    if across and policy.pp == "rack":
        largest = max(map(len, room.racks), default=0)
        need = _count(layout.pp, layout.tp, room)
        times = f" for each of {layout.dp} replicas, {sum(counts)} find them" if layout.dp > 1 else ""
        raise PlacementRefused(
            f"needs {need} in one rack{times}; the largest rack has {largest}",
            hint="placement.pp: prefer-rack lets a pipeline leave its rack",
        )
    rest: list[Group] = []
    for count, groups in zip(counts, room.racks, strict=True):
        yield from _stages(groups, count, layout.pp)
        rest += groups[count * layout.pp :]
    yield from _stages(rest + room.astray, across, layout.pp)


def _stages(groups: list[Group], count: int, pp: int) -> Iterator[Pipeline]:
    return (groups[start : start + pp] for start in range(0, count * pp, pp))


def _spread(layout: ParallelLayout, room: _Room) -> list[int]:
    """Replicas of each rack, as even as its room allows; fewer than dp in all where racks are too small."""
    fits = [len(groups) // layout.pp for groups in room.racks]
    counts = [0] * len(fits)
    left = min(layout.dp, sum(fits))
    open_racks = [rack for rack, most in enumerate(fits) if most]
    while left:
        for rack in open_racks[:left]:
            counts[rack] += 1
        left -= len(open_racks[:left])
        open_racks = [rack for rack in open_racks if counts[rack] < fits[rack]]
    return counts


def _count(groups: int, tp: int, room: _Room) -> str:
    if room.per_node <= 1:
        return f"{groups} node{'s' if groups > 1 else ''} with {tp} free slots for tp {tp}"
    return f"{groups} groups of {tp} free slots in one node for tp {tp}"
