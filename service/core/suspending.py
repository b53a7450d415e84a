"""What each event does to a job that gives its slots back: to wait, by its user's wish or since it has to yield, or for
good.

A gang at work completes the step under way, has its state in storage, and ends. One that does not work yet just ends.
What breaks it meanwhile is no incident: nothing of it is to go on now, and what it had is where it goes on later.
"""

from __future__ import annotations

import dataclasses

from service.contracts import events
from service.contracts.job import Phase
from service.core.commands import PauseGang, ReleaseGang
from service.core.liveness import Limits
from service.core.moving import STEPS
from service.core.outcome import Outcome, move, record, stop
from service.core.state import Job, Pause


@dataclasses.dataclass(frozen=True, slots=True)
class YieldDecided:
    """The scheduling pass wants all slots of a gang at work for a job that comes first. The core itself makes it."""

    uid: str
    reason: str
    at: float


def requested(job: Job, event: events.SuspendRequested, limits: Limits) -> Outcome:
    wished = dataclasses.replace(job, suspend=True)
    if job.phase in (Phase.SUSPENDING, Phase.SUSPENDED):
        return Outcome(wished)
    if job.placement is None:
        return _suspended(wished, event.at)
    if job.phase in (Phase.RUNNING, Phase.RESCALING) and not job.stopping:
        return ending(wished, "suspend requested", Phase.SUSPENDING, None, event.at, limits)
    reason = f"suspend requested; waits until its {len(job.placement.held)} slots are free"
    commands, changes = stop(job, reason, keep=False)
    return move(wished, Phase.SUSPENDING, "JobSuspending", reason, event.at, commands, **changes)


def yielding(job: Job, event: YieldDecided, limits: Limits) -> Outcome:
    return ending(job, event.reason, Phase.SUSPENDING, None, event.at, limits)


def resumed(job: Job, event: events.ResumeRequested, limits: Limits) -> Outcome:
    """Of a job that still ends: it is queued as soon as it has."""
    wished = dataclasses.replace(job, suspend=False)
    if job.phase is Phase.SUSPENDING:
        return Outcome(wished)
    return _queued(wished, "resumed by request", event.at)


def paused(job: Job, event: events.GangPaused, limits: Limits) -> Outcome:
    if job.stopping or job.placement is None:
        return Outcome(job)
    after = dataclasses.replace(job, step=max(job.step, event.step), progress_at=max(job.progress_at, event.at))
    return _stopped(after, f"attempt {job.attempt} ended after step {after.step}, which is in storage", event.at)


def ticked(job: Job, event: events.Ticked, limits: Limits) -> Outcome:
    if job.pause is None or job.stopping or event.at <= job.pause.until:
        return Outcome(job)
    waited = event.at - job.phase_since
    return _stopped(job, f"attempt {job.attempt} did not end within {waited:.0f} s and is stopped", event.at)


def faulted(job: Job, event: events.GangFaulted, limits: Limits) -> Outcome:
    return _broken(job, event.faults[0].message, event.at)


def fleet_observed(job: Job, event: events.FleetObserved, limits: Limits) -> Outcome:
    alive = {node.id for node in event.fleet.nodes}
    gone = [slot.name for slot in (job.placement.slots if job.placement else ()) if slot.node not in alive]
    return _broken(job, f"node {gone[0]} is gone from the fleet", event.at) if gone else Outcome(job)


def freed(job: Job, event: events.GangStopped | events.GangRefused, limits: Limits) -> Outcome:
    """Nothing is kept, also where that was ordered before."""
    if job.placement is None:
        return Outcome(job)
    keeps = job.keeping and isinstance(event, events.GangStopped)
    after = dataclasses.replace(
        job, placement=None, kept=job.placement if keeps else None, stopping=False, keeping=False, pause=None
    )
    if job.suspend:
        return _suspended(after, event.at)
    return _queued(after, f"attempt {job.attempt} has given its slots back", event.at)


def ending(job: Job, why: str, phase: Phase, last: Phase | None, at: float, limits: Limits) -> Outcome:
    """Into `phase` until the gang has ended after the step under way. `last`: the terminal phase that follows."""
    reason = f"{why}; ends after the step under way"
    until = at + limits.pausing_s + STEPS * (job.step_s or 0.0)
    order = PauseGang(job.uid, job.attempt, reason, durable=True)
    pause = Pause("suspended", reason, until, durable=True)
    return move(job, phase, f"Job{phase.capitalize()}", reason, at, (order,), pause=pause, ending=last)


def _broken(job: Job, message: str, at: float) -> Outcome:
    if job.stopping or job.placement is None:
        return Outcome(job)
    return _stopped(job, f"attempt {job.attempt} broke before it ended: {message}", at)


def _stopped(job: Job, reason: str, at: float) -> Outcome:
    commands, changes = stop(job, reason, keep=False)
    after = dataclasses.replace(job, **changes)
    return Outcome(after, commands, (record(after, "GangStopping", reason, at),))


def _suspended(job: Job, at: float) -> Outcome:
    reason = f"suspended after step {job.step} by request; it holds no slots"
    return _without(job, Phase.SUSPENDED, "JobSuspended", reason, at)


def _queued(job: Job, reason: str, at: float) -> Outcome:
    return _without(job, Phase.QUEUED, "JobQueued", f"{reason}; goes on after step {job.step}", at)


def _without(job: Job, phase: Phase, kind: str, reason: str, at: float) -> Outcome:
    free = (ReleaseGang(job.uid, reason),) if job.kept else ()
    return move(job, phase, kind, reason, at, free, kept=None, not_before=0.0)
