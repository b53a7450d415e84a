"""A layout on a fleet: the slot of each rank. Knows nodes, racks and kinds of device; knows no jobs and no bandwidths.

A tp group stands inside one NVLink domain, and inside one node of it where it can. A replica stands on devices of one
kind, and its stages in one rack, next stages on neighbouring nodes; a pipeline that no rack has room for crosses as few
racks as it can. Replicas spread over the racks as evenly as these allow, numbered rack by rack. Nodes neighbour each
other in the order of the fleet. The same input gives the same placement.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set

from service.contracts.cluster import Fleet, Node
from service.contracts.errors import PlacementRefused
from service.contracts.job import PlacementPolicy
from service.core.state import Placement, Slot
from workers.spec import ParallelLayout

Group = Sequence[Slot]  # of one stage of one replica: tp slots
Pipeline = Sequence[Group]  # of one replica: a group for each stage


@dataclasses.dataclass(frozen=True, slots=True)
class _Room:
    """Free groups of tp slots of one kind of device, in physical order."""

    racks: tuple[list[Group], ...]
    astray: list[Group]  # over several racks; only where tp may leave its domain
    most: int  # groups in one domain
    word: str  # what a domain is

    @property
    def groups(self) -> int:
        return sum(map(len, self.racks)) + len(self.astray)

    def replicas(self, pp: int, policy: PlacementPolicy) -> int:
        """How many pipelines there is room for."""
        return sum(len(groups) // pp for groups in self.racks) if policy.pp == "rack" else self.groups // pp


def place(
    layout: ParallelLayout,
    fleet: Fleet,
    taken: Set[tuple[str, int]],
    policy: PlacementPolicy,
    device: str,
    speeds: Mapping[str, float] | None = None,
) -> Placement:
    """The slot of each rank, none in `taken` (node id, device index). PlacementRefused counts what lacks.

    `speeds`: of each kind of accelerator, in any unit: the fastest that has room for all replicas gets them all; where
    none has, the faster ones get as many as they can.
    """
    nodes = [node for node in fleet.nodes if node.device == device]
    touched = {node for node, _ in taken}
    free = [(node, _free(node, taken, touched)) for node in nodes]
    total, every = sum(len(slots) for _, slots in free), sum(node.slots for node in nodes)
    if total < layout.world:
        raise PlacementRefused(f"needs {layout.world} {device} slots; {total} of {every} are free")
    kinds: dict[str, list[tuple[Node, list[Slot]]]] = defaultdict(list)
    for node, slots in free:
        kinds[node.accelerator].append((node, slots))
    known = speeds or {}
    order = sorted(kinds, key=lambda kind: -known.get(kind, 0.0))
    rooms = {kind: _room(kinds[kind], layout.tp, policy) for kind in order}
    shares = _shares(layout, rooms, policy, total)
    pipelines = [one for kind, dp in shares.items() for one in _pipelines(layout, dp, rooms[kind], policy)]
    coordinates = map(layout.coordinates, range(layout.world))
    return Placement(tuple(pipelines[dp][pp][tp] for pp, dp, tp in coordinates))


def room(
    layout: ParallelLayout, fleet: Fleet, taken: Set[tuple[str, int]], policy: PlacementPolicy, device: str
) -> int:
    """How many replicas like those of `layout` there is room for."""
    kinds: dict[str, list[tuple[Node, list[Slot]]]] = defaultdict(list)
    touched = {node for node, _ in taken}
    for node in fleet.nodes:
        if node.device == device:
            kinds[node.accelerator].append((node, _free(node, taken, touched)))
    return sum(_room(free, layout.tp, policy).replicas(layout.pp, policy) for free in kinds.values())


def ranks(layout: ParallelLayout, replica: int) -> Iterator[int]:
    """Of one replica."""
    for pp in range(layout.pp):
        first = (pp * layout.dp + replica) * layout.tp
        yield from range(first, first + layout.tp)


def problem(
    layout: ParallelLayout, slots: Sequence[Slot], fleet: Fleet, policy: PlacementPolicy, replicas: Sequence[int]
) -> str | None:
    """Which rule of this module these replicas break on these slots, or None."""
    nodes = {node.id: node for node in fleet.nodes}
    for replica in replicas:
        stood = [nodes[slots[rank].node] for rank in ranks(layout, replica)]
        if len({(node.accelerator, node.rack_key if policy.pp == "rack" else "") for node in stood}) > 1:
            return f"replica {replica} leaves its rack or its kind of device"
        for first in range(0, len(stood), layout.tp):
            group = stood[first : first + layout.tp]
            domains = {(node.rack_key, node.id if policy.tp == "node" else node.domain_key) for node in group}
            if policy.tp != "any" and len(domains) > 1:
                return f"a tp group of replica {replica} leaves its domain"
    return None


def _free(node: Node, taken: Set[tuple[str, int]], touched: Set[str]) -> list[Slot]:
    """`touched`: ids of the nodes of which any slot is taken."""
    every = _slots(node.id, node.name, node.slots)
    return [slot for slot in every if (slot.node, slot.index) not in taken] if node.id in touched else every


@functools.lru_cache(maxsize=1 << 16)
def _slots(node: str, name: str, count: int) -> list[Slot]:
    """Of a node; made once, for a large fleet is placed on again and again. Nobody changes the list."""
    return [Slot(node, name, index) for index in range(count)]


def _room(free: Sequence[tuple[Node, list[Slot]]], tp: int, policy: PlacementPolicy) -> _Room:
    domains: dict[tuple[str, str], list[list[Slot]]] = defaultdict(list)
    for node, slots in free:
        domains[node.rack_key, node.id if policy.tp == "node" else node.domain_key].append(slots)
    racks: dict[str, list[Group]] = defaultdict(list)
    loose: dict[str, list[Slot]] = defaultdict(list)
    most = 0
    for (rack, _), members in domains.items():
        inside, rest = _grouped(members, tp)
        racks[rack] += inside
        loose[rack] += rest
        most = max(most, len(inside))
    astray: list[Slot] = []
    if policy.tp == "any":
        for rack, slots in loose.items():
            found, rest = _chunks(slots, tp)
            racks[rack] += found
            astray += rest
    over = _chunks(astray, tp)[0] if policy.pp != "rack" else []
    word = "NVLink domain" if any(len(members) > 1 for members in domains.values()) else "node"
    return _Room(tuple(racks.values()), over, most, word)


def _grouped(members: Sequence[list[Slot]], tp: int) -> tuple[list[Group], list[Slot]]:
    """Groups of a domain, those inside one node first, and what is left."""
    groups: list[Group] = []
    rest: list[Slot] = []
    for slots in members:
        inside, left = _chunks(slots, tp)
        groups += inside
        rest += left
    across, rest = _chunks(rest, tp)
    return groups + across, rest


def _chunks(slots: list[Slot], size: int) -> tuple[list[Group], list[Slot]]:
    whole = len(slots) // size * size
    return [slots[start : start + size] for start in range(0, whole, size)], slots[whole:]


def _shares(layout: ParallelLayout, rooms: Mapping[str, _Room], policy: PlacementPolicy, total: int) -> dict[str, int]:
    """Replicas on each kind of device."""
    for kind, room in rooms.items():
        if room.replicas(layout.pp, policy) >= layout.dp:
            return {kind: layout.dp}
    shares, left = {}, layout.dp
    for kind, room in rooms.items():
        shares[kind] = min(left, room.replicas(layout.pp, policy))
        left -= shares[kind]
    if left:
        raise _refusal(layout, rooms, policy, total)
    return {kind: dp for kind, dp in shares.items() if dp}


def _refusal(
    layout: ParallelLayout, rooms: Mapping[str, _Room], policy: PlacementPolicy, total: int
) -> PlacementRefused:
    groups = sum(room.groups for room in rooms.values())
    widest = max(rooms.values(), key=lambda room: room.most)
    if groups < layout.dp * layout.pp:
        need = _count(layout.dp * layout.pp, layout.tp, widest)
        return PlacementRefused(
            f"needs {need}; there are {groups} among {total} free slots",
            hint="a smaller tp, or placement.tp: any, needs less in one node",
        )
    fits = {kind or "one kind": room.replicas(layout.pp, policy) for kind, room in rooms.items()}
    if policy.pp == "rack":
        largest = max((len(groups) for room in rooms.values() for groups in room.racks), default=0)
        need = _count(layout.pp, layout.tp, widest)
        times = f" for each of {layout.dp} replicas, {sum(fits.values())} find them" if layout.dp > 1 else ""
        return PlacementRefused(
            f"needs {need} in one rack{times}; the largest rack has {largest}",
            hint="placement.pp: prefer-rack lets a pipeline leave its rack",
        )
    found = ", ".join(f"{kind} has room for {count}" for kind, count in fits.items())
    return PlacementRefused(
        f"needs {layout.dp} replicas of {layout.pp * layout.tp} slots, each on devices of one kind; {found}",
        hint="a smaller dp or pp would fit",
    )


def _pipelines(layout: ParallelLayout, dp: int, room: _Room, policy: PlacementPolicy) -> Iterator[Pipeline]:
    """dp pipelines: those inside a rack first, then, where the policy lets them, those across racks."""
    counts = [0] * len(room.racks) if policy.pp == "any" else _spread(dp, layout.pp, room)
    rests: list[list[Group]] = []
    for count, groups in zip(counts, room.racks, strict=True):
        yield from _stages(groups, count, layout.pp)
        rests.append(groups[count * layout.pp :])
    across = dp - sum(counts)
    if policy.pp == "any":
        yield from _stages([*itertools.chain(*rests), *room.astray], across, layout.pp)
    else:
        yield from _across([*rests, room.astray], across, layout.pp)


def _stages(groups: list[Group], count: int, pp: int) -> Iterator[Pipeline]:
    return (groups[start : start + pp] for start in range(0, count * pp, pp))


def _across(rests: list[list[Group]], count: int, pp: int) -> Iterator[Pipeline]:
    """Pipelines over what racks have left, each over as few of them as there is room for."""
    for _ in range(count):
        pipeline: list[Group] = []
        for rack in _fewest([len(rest) for rest in rests], pp):
            taken = min(pp - len(pipeline), len(rests[rack]))
            pipeline += rests[rack][:taken]
            rests[rack] = rests[rack][taken:]
        yield pipeline


def _fewest(sizes: Sequence[int], wanted: int) -> list[int]:
    """Places of the fewest sizes that have `wanted` together: such that use all of theirs, if there are any; else the
    largest ones, and of those that can give the rest the smallest."""
    by_size = sorted((place for place, size in enumerate(sizes) if size), key=lambda place: (-sizes[place], place))
    count, total = 0, 0
    while total < wanted:
        total += sizes[by_size[count]]
        count += 1
    if (exact := _exact(by_size, sizes, wanted, count)) is not None:
        return exact
    first = by_size[: count - 1]
    lack = wanted - sum(sizes[place] for place in first)
    return [*first, min((p for p in by_size[count - 1 :] if sizes[p] >= lack), key=lambda p: (sizes[p], p))]


def _exact(places: Sequence[int], sizes: Sequence[int], wanted: int, count: int) -> list[int] | None:
    """`count` of the places whose sizes are `wanted` together; None if there are none. Places of a size are alike."""
    if count == 0:
        return [] if wanted == 0 else None
    tried: set[int] = set()
    for at, place in enumerate(places):
        size = sizes[place]
        if size * count < wanted:  # they only get smaller
            return None
        if size > wanted or size in tried:
            continue
        tried.add(size)
        if (rest := _exact(places[at + 1 :], sizes, wanted - size, count - 1)) is not None:
            return [place, *rest]
    return None


def _spread(dp: int, pp: int, room: _Room) -> list[int]:
    """Replicas of each rack, as even as its room allows; fewer than dp in all where racks are too small."""
    fits = [len(groups) // pp for groups in room.racks]
    counts = [0] * len(fits)
    left = min(dp, sum(fits))
    open_racks = [rack for rack, most in enumerate(fits) if most]
    while left:
        for rack in open_racks[:left]:
            counts[rack] += 1
        left -= len(open_racks[:left])
        open_racks = [rack for rack in open_racks if counts[rack] < fits[rack]]
    return counts


def _count(groups: int, tp: int, room: _Room) -> str:
    if room.most <= 1 and room.word == "node":
        return f"{groups} node{'s' if groups > 1 else ''} with {tp} free slots for tp {tp}"
    return f"{groups} groups of {tp} free slots in one {room.word} for tp {tp}"
