"""Which replicas and pipeline ranks stand where: a placement told rack by rack, alike ones in one line."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from service.contracts.cluster import Fleet
from service.core.state import Placement
from workers.spec import ParallelLayout

Stages = tuple[int, ...]  # pipeline ranks


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Of one rack; of racks that share pipelines; or of such blocks that follow each other and are alike."""

    racks: tuple[str, ...]
    nodes: tuple[str, ...]  # of all of them, in the order of the fleet
    slots: int  # used
    holds: tuple[tuple[tuple[int, ...], Stages], ...]  # (replicas, pipeline ranks that these have here)
    block: int = 1  # racks that share pipelines
    kind: str = ""  # of their devices, where the fleet has several

    @property
    def held(self) -> tuple[str, ...]:
        return tuple(
            f"replica{'s' * (len(dp) > 1)} {numbers(dp)}, pipeline rank{'s' * (len(pp) > 1)} {numbers(pp)}"
            for dp, pp in self.holds
        )

    def __str__(self) -> str:
        racks = f"rack{'s' * (len(self.racks) > 1)} {names(self.racks)}"
        by = f", {self.block} by {self.block}" if 1 < self.block < len(self.racks) else ""
        of = f" of {self.kind}" if self.kind else ""
        return f"{racks}{by}: nodes {names(self.nodes)}{of}: {'; '.join(self.held)}"


def lines(layout: ParallelLayout, placed: Placement, fleet: Fleet) -> tuple[Line, ...]:
    racks = list(_racks(layout, placed, fleet))
    blocks = [_block(list(own)) for _, own in itertools.groupby(racks, key=_pipelines)]
    return tuple(_merged(list(alike)) for _, alike in itertools.groupby(blocks, key=_pattern))


def _racks(layout: ParallelLayout, placed: Placement, fleet: Fleet) -> Iterable[Line]:
    racks = {node.id: node.rack_key for node in fleet.nodes}
    held: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    slots: dict[str, int] = defaultdict(int)
    for rank, slot in enumerate(placed.slots):
        pp, dp, _ = layout.coordinates(rank)
        held[racks[slot.node]][dp].add(pp)
        slots[racks[slot.node]] += 1
    used = set(placed.nodes)
    nodes: dict[str, list[str]] = defaultdict(list)
    titles: dict[str, str] = {}
    own: dict[str, set[str]] = defaultdict(set)
    several = len({node.accelerator for node in fleet.nodes}) > 1
    for node in fleet.nodes:
        if node.id in used:
            nodes[node.rack_key].append(node.name)
            own[node.rack_key].add(node.accelerator or node.device)
            titles[node.rack_key] = "/".join(filter(None, (node.zone, node.rack))) or node.name
    for rack, members in nodes.items():
        by_stages: dict[Stages, list[int]] = defaultdict(list)
        for dp in sorted(held[rack]):
            by_stages[tuple(sorted(held[rack][dp]))].append(dp)
        holds = tuple((tuple(replicas), stages) for stages, replicas in by_stages.items())
        kind = " and ".join(sorted(own[rack])) if several else ""
        yield Line((titles[rack],), tuple(members), slots[rack], holds, kind=kind)


def _pipelines(line: Line) -> object:
    """The replicas of a rack that has nothing but the same part of each; equal for no two racks otherwise."""
    return line.holds[0][0] if len(line.holds) == 1 else id(line)


def _block(racks: Sequence[Line]) -> Line:
    if len(racks) == 1:
        return racks[0]
    stages = tuple(sorted({stage for line in racks for stage in line.holds[0][1]}))
    return Line(
        tuple(line.racks[0] for line in racks),
        tuple(name for line in racks for name in line.nodes),
        sum(line.slots for line in racks),
        ((racks[0].holds[0][0], stages),),
        len(racks),
        racks[0].kind,
    )


def _pattern(line: Line) -> object:
    return line.kind, line.block, len(line.nodes), tuple((len(dp), pp) for dp, pp in line.holds)


def _merged(alike: Sequence[Line]) -> Line:
    replicas: list[list[int]] = [[] for _ in alike[0].holds]
    for line in alike:
        for own, (dp, _) in zip(replicas, line.holds, strict=True):
            own.extend(dp)
    holds = zip(replicas, (pp for _, pp in alike[0].holds), strict=True)
    return Line(
        tuple(name for line in alike for name in line.racks),
        tuple(name for line in alike for name in line.nodes),
        sum(line.slots for line in alike),
        tuple((tuple(sorted(set(dp))), pp) for dp, pp in holds),
        alike[0].block,
        alike[0].kind,
    )


def numbers(found: Iterable[int]) -> str:
    """0-3, 8, 12-13."""
    return ", ".join(_range(str(first), str(last)) for first, last in _runs(list(found)))


def names(found: Sequence[str]) -> str:
    """n0-n3, n8, spare: names that end in numbers that follow each other."""
    split = [re.fullmatch(r"(.*?)(\d{1,15})", name) for name in found]
    told: list[str] = []
    for start, group in itertools.groupby(zip(split, found, strict=True), key=lambda pair: pair[0] and pair[0][1]):
        members = [name for _, name in group]
        if start is None:
            told += members
            continue
        digits = {int(name[len(start) :]): name for name in members}
        told += [_range(digits[first], digits[last]) for first, last in _runs(list(digits))]
    return ", ".join(told)


def _runs(found: Sequence[int]) -> Iterable[tuple[int, int]]:
    for _, group in itertools.groupby(enumerate(found), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        yield members[0], members[-1]


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first}-{last}"
