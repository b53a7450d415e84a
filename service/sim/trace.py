"""Recorded faults: what happened to each node of a fleet that was watched, and the same for a fleet of another size.

Reads what others published: InfiniteHBD's faults and repairs (JSON, days), Bamboo's spot instances (lines of
`ms,add|remove,name` or of `date, time, count`). Where only a count is known, which node goes or comes is drawn.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from service.contracts.errors import UserError
from service.sim import clock
from service.sim.faults import Failure

INFINITE_HBD_NODES = 400
"""Were watched; its file names only the 231 that failed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outage:
    start: int  # microseconds
    end: int
    cause: str


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """The outages of each node, in order and apart, within `span` microseconds."""

    nodes: tuple[tuple[Outage, ...], ...]
    span: int

    @property
    def outages(self) -> int:
        return sum(map(len, self.nodes))


def read(path: Path) -> Trace:
    """UserError where the file is none of the known forms."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}", hint="name a file of faults, or rates") from None
    try:
        if text.lstrip().startswith("["):
            return _infinite_hbd(text)
        rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
        return _named(rows) if rows[0][1] in ("add", "remove") else _counted(rows)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        hint = "known are InfiniteHBD's fault_trace.json and Bamboo's ms,add|remove,name or date,time,count"
        raise UserError(f"{path} is no trace of faults: {error}", hint=hint) from None


def spread(trace: Trace, nodes: int, span: int, seed: int) -> list[Failure]:
    """The failures of a fleet of `nodes` in `span` microseconds, at the trace's rate for each node.

    A fleet as large as the trace's has its nodes, one for one. Any other is made of as many copies of it as it takes,
    the last one a sample. Each copy begins at a time of its own, and goes on at the beginning after its end: nodes
    that failed together in the trace fail together, but not with their doubles in another copy. Nodes that are down
    where the copy begins are down from the start.
    """
    chance, many = random.Random(seed), len(trace.nodes)
    failures: list[Failure] = []
    for first in range(0, nodes, many):
        size = min(many, nodes - first)
        chosen = range(many) if size == many else chance.sample(range(many), size)
        offset = 0 if nodes == many else chance.randrange(trace.span)
        for place, index in enumerate(chosen):
            failures += _seen(trace.nodes[index], first + place, offset, trace.span, span)
    return sorted(failures)


def _seen(outages: Sequence[Outage], node: int, offset: int, length: int, span: int) -> Iterator[Failure]:
    """The outages between `offset` and `offset` + `span` of a trace that repeats."""
    for again in range((offset + span) // length + 1):
        for outage in outages:
            start, end = outage.start + again * length - offset, outage.end + again * length - offset
            if end > 0 and start < span:
                yield Failure(max(0, start), node, "node", outage.cause, end)


def _infinite_hbd(text: str) -> Trace:
    spans: dict[str, list[Outage]] = {}
    begun: dict[str, list[tuple[int, str]]] = {}
    last = 0
    for event in json.loads(text):
        name, at = event["node_id"], round(event["event_time"] * clock.DAY)
        last = max(last, at)
        if event["event_type"] == "fault_start":
            begun.setdefault(name, []).append((at, event["fault_type"]["Class"]))
        else:
            start, cause = begun[name].pop(0)
            spans.setdefault(name, []).append(Outage(start, at, cause))
    if not spans:
        raise ValueError("it has no faults")
    quiet = [()] * (INFINITE_HBD_NODES - len(spans))
    return Trace((*map(_apart, spans.values()), *quiet), last)


def _named(rows: Sequence[Sequence[str]]) -> Trace:
    """A node that is added takes a seat that is free: a fleet's node is a seat, which is empty at times."""
    seats: list[list[Outage]] = []
    taken: dict[str, int] = {}
    empty: dict[int, int] = {}  # seat -> since when
    at = 0
    for when, what, name in rows:
        at = int(float(when) * 1000)
        if what == "remove":
            seat = taken.pop(name)
            empty[seat] = at
        elif empty:
            seat = min(empty, key=lambda one: (empty[one], one))
            seats[seat].append(Outage(empty.pop(seat), at, "preemption"))
            taken[name] = seat
        else:
            taken[name] = len(seats)
            seats.append([Outage(0, at, "not there yet")] if at else [])
    return _closed(seats, empty, at)


def _counted(rows: Sequence[Sequence[str]]) -> Trace:
    counts = list(_counts(rows))
    begin, chance = counts[0][0], random.Random(0)
    seats: list[list[Outage]] = [[] for _ in range(max(count for _, count in counts))]
    empty = dict.fromkeys(range(len(seats)), 0)
    for at, count in counts:
        while len(seats) - len(empty) > count:
            empty[chance.choice([seat for seat in range(len(seats)) if seat not in empty])] = at - begin
        while len(seats) - len(empty) < count:
            seat = chance.choice(sorted(empty))
            if (since := empty.pop(seat)) < at - begin:
                seats[seat].append(Outage(since, at - begin, "preemption"))
    return _closed(seats, empty, counts[-1][0] - begin)


def _counts(rows: Sequence[Sequence[str]]) -> Iterator[tuple[int, int]]:
    """(microseconds, nodes there)."""
    for day, time, count in rows:
        moment = datetime.datetime.fromisoformat(f"{day}T{time}+00:00")
        yield clock.us(moment.timestamp()), int(count)


def _closed(seats: Sequence[list[Outage]], empty: dict[int, int], end: int) -> Trace:
    for seat, since in empty.items():
        if since < end:
            seats[seat].append(Outage(since, end, "preemption"))
    if end <= 0:
        raise ValueError("it has no length")
    return Trace(tuple(map(_apart, seats)), end)


def _apart(outages: Sequence[Outage]) -> tuple[Outage, ...]:
    """In order; those that touch are one, under the first one's cause."""
    merged: list[Outage] = []
    for one in sorted(outages, key=lambda outage: outage.start):
        if merged and one.start <= merged[-1].end:
            merged[-1] = dataclasses.replace(merged[-1], end=max(merged[-1].end, one.end))
        else:
            merged.append(one)
    return tuple(merged)
