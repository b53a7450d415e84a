"""Which gangs at work give slots to a job that comes before them and finds no room.

First those that can go on with fewer, then, where that does not do, those that have to wait. In either case the last in
the order of `queue` first, and none that is not needed. Knows placement, and one moment: what was decided before and is
not done yet, its caller waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from service.contracts.cluster import Fleet
from service.contracts.errors import PlacementRefused
from service.contracts.job import Phase
from service.core import elastic, queue
from service.core.elastic import Fit
from service.core.queue import Queues
from service.core.state import Job, Taken


def yields(job: Job, to: Job, queues: Queues) -> bool:
    """Whether a gang at work is to give way: its priority is lower, or it fills in where `to` comes first."""
    if job.phase is not Phase.RUNNING or job.spec.resources.device != to.spec.resources.device:
        return False
    if queue.priority(job, queues) < queue.priority(to, queues):
        return True
    return job.backfilled and queue.first(to, job, queues)


def victims(job: Job, jobs: Iterable[Job], queues: Queues, fleet: Fleet, barred: Taken) -> tuple[list[Job], bool]:
    """Who is to yield, and whether they go on with fewer slots. None where that would not make room."""
    others = [other for other in jobs if other.uid != job.uid]
    last_first = sorted(others, key=lambda other: queue.place(other, queues), reverse=True)
    candidates = [other for other in last_first if yields(other, job, queues)]
    if not candidates or not _fits(job, others, candidates, fleet, barred, smaller=False):
        return [], False
    shrinkable = [one for one in candidates if one.layout is not None and elastic.least(one) < one.layout.world]
    for smaller, pool in ((True, shrinkable), (False, candidates)):
        if count := _enough(job, others, pool, fleet, barred, smaller):
            return _needed(job, others, pool[:count], fleet, barred, smaller), smaller
    return [], False


def fit(job: Job, fleet: Fleet, taken: Taken, most: int | None = None) -> Fit | None:
    """The job at the size that it wants, or the largest that it may have; of no more than `most` slots."""
    wants, least = elastic.slots(job), elastic.least(job)
    if most is None or most >= wants:
        try:
            return elastic.wanted(job, fleet, taken)
        except PlacementRefused:
            pass
    below = wants if most is None else min(wants, most + 1)
    return elastic.largest(job, fleet, taken, least - 1, below, "no more is free") if least < below else None


def _enough(job: Job, others: Sequence[Job], pool: Sequence[Job], fleet: Fleet, barred: Taken, smaller: bool) -> int:
    """How many of the first of `pool` make room; 0: not all of them would. More of them make more room, so that it is
    looked for by halves."""
    if not pool or not _fits(job, others, pool, fleet, barred, smaller):
        return 0
    few, enough = 0, len(pool)
    while enough - few > 1:
        half = (few + enough) // 2
        if _fits(job, others, pool[:half], fleet, barred, smaller):
            enough = half
        else:
            few = half
    return enough


def _needed(
    job: Job, others: Sequence[Job], chosen: Sequence[Job], fleet: Fleet, barred: Taken, smaller: bool
) -> list[Job]:
    """Without those that it would do without; who comes first is asked first."""
    needed = list(chosen)
    for one in reversed(chosen):
        rest = [other for other in needed if other is not one]
        if rest and _fits(job, others, rest, fleet, barred, smaller):
            needed = rest
    return needed


def _fits(job: Job, others: Sequence[Job], chosen: Sequence[Job], fleet: Fleet, barred: Taken, smaller: bool) -> bool:
    """Whether there is room for the job once all of `chosen` have ended; with `smaller`, then for each of them too."""
    leaving = {one.uid for one in chosen}
    taken = set(queue.taken(other for other in others if other.uid not in leaving) | barred)
    there = {node.id: node.slots for node in fleet.nodes if node.device == job.spec.resources.device}
    if sum(there.values()) - sum(node in there for node, _ in taken) < elastic.least(job):
        return False
    for one in (job, *reversed(chosen)) if smaller else (job,):
        found = fit(one, fleet, taken)
        if found is None:
            return False
        taken |= {(slot.node, slot.index) for slot in found.placement.held}
    return True
