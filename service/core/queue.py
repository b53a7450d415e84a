"""Who is next and why the others wait: by the priority of the queue, then of the job; of equals those that had a gang
first, then by submission.

Knows no layout and no topology: it counts slots. Of the jobs of a project no more run than its quota allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set

from service.contracts.cluster import Fleet
from service.contracts.job import Phase
from service.core.state import Job

NAMED_HOLDERS = 3
WAITING = (Phase.QUEUED, Phase.RECOVERING, Phase.RESCALING)

Queues = Mapping[str, int]  # name -> priority; one that is not there has 0


def order(jobs: Iterable[Job], queues: Queues) -> list[Job]:
    """The jobs that want a gang, next first. Those whose old gang still stops, or pauses, keep their place."""
    return sorted((job for job in jobs if job.phase in WAITING), key=lambda job: place(job, queues))


def place(job: Job, queues: Queues) -> tuple[int, int, bool, int]:
    """In the order of all jobs: the least comes first."""
    queue, own = priority(job, queues)
    return -queue, -own, job.phase is Phase.QUEUED, job.seq


def first(one: Job, other: Job, queues: Queues) -> bool:
    """Whether `one` comes before `other`, whatever each does now."""
    return (priority(other, queues), one.seq) < (priority(one, queues), other.seq)


def priority(job: Job, queues: Queues) -> tuple[int, int]:
    """Of its queue, and its own."""
    return queues.get(job.spec.queue, 0), job.spec.priority


def allowance(job: Job, jobs: Iterable[Job], quotas: Mapping[str, int]) -> int | None:
    """Slots that the job may hold beside all others of its project; None: as many as it likes."""
    quota = quotas.get(job.project)
    if quota is None:
        return None
    return quota - sum(len(other.held) for other in jobs if other.project == job.project and other.uid != job.uid)


def over_quota(job: Job, allowed: int, quotas: Mapping[str, int]) -> str:
    """Why its project's quota holds the job back."""
    need, quota = job.wanted_slots or job.spec.resources.slots, quotas[job.project]
    whole = f"of the {quota} that the quota of project {job.project} allows"
    if need > quota:
        return f"needs {need} slots, more than {whole.removeprefix('of ')}"
    return f"needs {need} slots; {quota - allowed} {whole} are held by its other jobs"


def taken(jobs: Iterable[Job]) -> set[tuple[str, int]]:
    """(node id, device index) of every slot that is held."""
    return {(slot.node, slot.index) for job in jobs for slot in job.held}


def firm(jobs: Iterable[Job], alive: Set[str]) -> set[tuple[str, int]]:
    """As `taken`, without what may be of no use: spares, and what is kept where a part is lost. `alive`: node ids."""
    slots: set[tuple[str, int]] = set()
    for job in jobs:
        holds = job.placement or job.kept
        if holds is not None and (job.placement or all(slot.node in alive for slot in holds.slots)):
            slots |= {(slot.node, slot.index) for slot in holds.slots}
    return slots


def shortage(job: Job, jobs: Collection[Job], fleet: Fleet, barred: Set[tuple[str, int]] = frozenset()) -> str | None:
    """Why there are too few free slots for `job`, with counts; None when there are enough. `barred` are of no use."""
    need, device = job.wanted_slots or job.spec.resources.slots, job.spec.resources.device
    alive = {node.id: node for node in fleet.nodes if node.device == device}
    total = sum(node.slots for node in alive.values())
    holders = [other for other in jobs if other.uid != job.uid or other.placement]
    held: Counter[str] = Counter()
    for other in holders:
        held[other.uid] += sum(slot.node in alive for slot in other.held)
    free = total - held.total() - sum(node in alive for node, _ in barred - taken(holders))
    if need <= free:
        return None
    if not total:
        return f"needs {need} slots; the fleet has no {device} node"
    return f"needs {need} slots; {free} of {total} are free{_holders(held)}"


def behind(head: Job) -> str:
    """Why a job waits that is not at the head."""
    need = head.wanted_slots or head.spec.resources.slots
    return f"waits behind {head.uid}, which comes first and needs {need} slots"


def _holders(held: Counter[str]) -> str:
    ranked = sorted((-count, name) for name, count in held.items() if count)
    parts = [f"{-count} by {name}" for count, name in ranked[:NAMED_HOLDERS]]
    if rest := ranked[NAMED_HOLDERS:]:
        parts.append(f"{-sum(count for count, _ in rest)} by {len(rest)} more")
    return f", {', '.join(parts).replace(' by ', ' held by ', 1)}" if parts else ""
