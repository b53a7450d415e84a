"""Taking up the jobs of an earlier controller: gangs at work go on, what was half done is ended and done again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from service.contracts import events
from service.contracts.cluster import Fleet
from service.contracts.job import Phase
from service.core import codec
from service.core.commands import PauseGang, RaiseStandbys, Record
from service.core.state import Job
from service.runtime import gang
from service.runtime.ear import AgentGone, Ear
from service.runtime.hands import Hands
from service.runtime.node_agent import RankDied

NOWHERE = Fleet()  # these orders need no address


@dataclasses.dataclass(slots=True)
class Adopted:
    jobs: list[Job] = dataclasses.field(default_factory=list)
    ears: dict[str, Ear] = dataclasses.field(default_factory=dict)
    events: list[events.Event] = dataclasses.field(default_factory=list)
    records: list[Record] = dataclasses.field(default_factory=list)


def adopt(cores: Iterable[Mapping[str, Any]], epoch: int, hands: Hands, now: float) -> Adopted:
    """Jobs from their stored state, an ear for each gang, and what has happened to the gangs meanwhile."""
    known = [codec.load(core) for core in cores]
    found = Adopted(jobs=[dataclasses.replace(job, watched_at=now) if job.placement else job for job in known])
    for job in found.jobs:
        if job.placement is None:  # what is kept of it waits for the next attempt
            continue
        found.ears[job.uid] = ear_of(job)
        if job.stopping:
            hands.stop(job.uid, job.attempt, last=job.ending is not None, keep=job.keeping)
        else:
            _take_up(job, found, epoch, hands, now)
    return found


def ear_of(job: Job) -> Ear:
    """Listens to the job's newest attempt."""
    slots = job.placement.slots if job.placement else ()
    return Ear(job.uid, job.attempt, len(slots), {rank: slot.name for rank, slot in enumerate(slots)})


def _take_up(job: Job, found: Adopted, epoch: int, hands: Hands, now: float) -> None:
    """The gang goes on when every rank is there or has said how it ended; what is missing is heard as a fault."""
    standings = {node: said for node, said in gang.standings(job.uid, epoch).items() if said.attempt == job.attempt}
    at_work = {rank for said in standings.values() for rank in said.pids}
    ended = [report for said in standings.values() for report in said.ended]
    slots = job.placement.slots if job.placement else ()
    missing = set(range(len(slots))) - at_work - {report.rank for report in ended}
    if missing and (not standings or job.phase is Phase.PLACING):
        message = f"a new controller (epoch {epoch}) found {len(at_work)} of {len(slots)} ranks at work"
        fault = events.Fault("gang_lost", message, step=job.step)
        found.events.append(events.GangFaulted(job.uid, job.attempt, (fault,), now))
        return
    if job.phase is Phase.PLACING:
        found.events.append(events.GangStarted(job.uid, job.attempt, now))
    shards = [shard for said in standings.values() for shard in said.shards]
    unpublished = [shard for shard in shards if shard.step > (job.checkpoint_step or 0)]
    silent = {slots[rank].name for rank in missing} - set(standings)
    gone = [AgentGone(job.uid, job.attempt, node, f"the agent on node {node} does not answer") for node in silent]
    died = [RankDied(rank, now) for rank in missing if slots[rank].name in standings]
    found.events += found.ears[job.uid].hear([*unpublished, *ended, *gone, *died], now)
    hands.watch(job)
    if job.phase is Phase.RUNNING and job.spec.resources.standbys and job.layout and job.placement:
        hands.do(RaiseStandbys(job.uid, job.attempt, job.layout, job.placement), job, NOWHERE)
    if job.pause is not None:
        hands.do(PauseGang(job.uid, job.attempt, job.pause.reason, job.pause.durable), job, NOWHERE)
    if not missing:
        message = f"a new controller (epoch {epoch}) found all {len(slots)} ranks of attempt {job.attempt} at work"
        found.records.append(Record(job.uid, "GangAdopted", message, now, {"attempt": job.attempt, "epoch": epoch}))
