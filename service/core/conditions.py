"""What is true of a job beside its phase, as Kubernetes tells it: type, status, reason, message, and since when.

The vocabulary is Kueue's where it has a word. Knows one job; decides nothing.
"""

from __future__ import annotations

import dataclasses

from service.contracts.job import Phase
from service.core import elastic, queue
from service.core.state import Condition, Job


def counted(before: Job | None, after: Job, at: float) -> Job:
    """The job with its conditions; one whose status stays keeps its time."""
    known = {one.type: one for one in before.conditions} if before else {}
    found = []
    for one in _now(after, at):
        old = known.get(one.type)
        found.append(dataclasses.replace(one, at=old.at) if old and old.status == one.status else one)
    return dataclasses.replace(after, conditions=tuple(found)) if tuple(found) != after.conditions else after


def _now(job: Job, at: float) -> list[Condition]:
    admitted = job.placement is not None and not job.stopping
    world = job.layout.world if job.layout and admitted else 0
    wants = elastic.slots(job)
    return [
        Condition("Admitted", admitted, _admitted(job, admitted), _held(job) if admitted else job.reason, at),
        Condition("Running", job.phase is Phase.RUNNING, _word(job.phase), f"its phase is {job.phase}", at),
        Condition("Degraded", 0 < world < wants, "FewerSlots" if 0 < world < wants else "AsWanted",
                  f"runs on {world} of the {wants} slots that it wants" if world else "runs on none", at),
        Condition("Suspended", job.phase is Phase.SUSPENDED, "Requested" if job.suspend else "NotRequested",
                  "is to hold nothing, by request" if job.suspend else "is to run", at),
        Condition("Finished", job.phase.terminal, _word(job.phase) if job.phase.terminal else "NotFinished",
                  job.reason if job.phase.terminal else "is not over", at),
    ]  # fmt: skip


def _admitted(job: Job, admitted: bool) -> str:
    if admitted:
        return "Backfilled" if job.backfilled else "QuotaReserved"
    return "Pending" if job.phase in queue.WAITING else _word(job.phase)


def _held(job: Job) -> str:
    return f"attempt {job.attempt} holds {len(job.held)} slots"


def _word(phase: Phase) -> str:
    return phase.value.capitalize()
