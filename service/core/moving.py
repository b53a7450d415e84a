"""What each event does to a job that leaves its slots on purpose: for another size, or for a node that goes.

The gang completes the step under way and ends; its state stays in memory. Nobody is charged, but for a node that the
cluster takes away. A pause that isn't answered in time is stopped anyway.
"""

from __future__ import annotations

import dataclasses

from service.contracts import events
from service.contracts.errors import PlacementRefused
from service.contracts.job import Phase
from service.core import elastic, incidents, recovery
from service.core.commands import PauseGang, ReleaseGang
from service.core.liveness import Limits
from service.core.outcome import Outcome, move, record, stop
from service.core.state import Incident, Job, MoveKind, Pause

STEPS = 2
"""A pause has the time of so many steps beside its own: one is under way, and ranks differ."""


@dataclasses.dataclass(frozen=True, slots=True)
class MoveDecided:
    """The scheduling pass wants a gang at work on other slots. The core itself makes this event."""

    uid: str
    kind: MoveKind
    reason: str
    at: float
    node: str | None = None  # that is to be left
    deadline: float | None = None


def pausing(job: Job, event: MoveDecided, limits: Limits) -> Outcome:
    """The gang is to end after the step under way, at the deadline at the latest."""
    until = event.at + limits.pausing_s + STEPS * (job.step_s or 0.0)
    pause = Pause(event.kind, event.reason, min(until, event.deadline or until), event.node)
    order = PauseGang(job.uid, job.attempt, event.reason)
    return move(job, Phase.RESCALING, "JobPausing", event.reason, event.at, (order,), {"kind": event.kind}, pause=pause)


def restarting(job: Job, event: events.RestartRequested, limits: Limits) -> Outcome:
    return pausing(job, MoveDecided(job.uid, "restart", "is started again by request", event.at), limits)


def paused(job: Job, event: events.GangPaused, limits: Limits) -> Outcome:
    if job.stopping or job.placement is None:
        return Outcome(job)
    after = dataclasses.replace(job, step=max(job.step, event.step), progress_at=max(job.progress_at, event.at))
    return _left(after, event.at, f"attempt {job.attempt} paused after step {after.step}")


def ticked(job: Job, event: events.Ticked, limits: Limits) -> Outcome:
    if job.pause is None or job.stopping or job.placement is None or event.at <= job.pause.until:
        return Outcome(job)
    waited = event.at - job.phase_since
    return _left(job, event.at, f"attempt {job.attempt} did not pause within {waited:.0f} s and is stopped")


def requested(job: Job, event: events.RescaleRequested, limits: Limits) -> Outcome:
    """What is wanted from now on; the scheduling pass sees to it. A job that waits is placed so at once."""
    try:
        asked = elastic.asking_for(job.spec, event.slots, event.layout)
    except PlacementRefused as refused:
        line = record(job, "RescaleRefused", refused.message, event.at, {"slots": event.slots})
        return Outcome(job, (), (line,))
    written = event.layout is None and event.slots == job.spec.resources.slots
    wanted = (None, None) if written else (event.slots, event.layout)
    if wanted == (job.wanted_slots, job.wanted_layout):
        return Outcome(job)
    before, placed = elastic.slots(job), job.placement is not None and not job.stopping
    layout = f" in {event.layout}" if event.layout else ""
    reason = f"is to run on {asked.resources.slots} slots{layout} from now on, by request; it was {before}"
    after = dataclasses.replace(job, wanted_slots=wanted[0], wanted_layout=wanted[1], rescale="" if placed else None)
    return Outcome(after, (), (record(after, "RescaleRequested", reason, event.at, {"slots": event.slots}),))


def unmet(job: Job, why: str, at: float) -> Outcome:
    """Why the job does not have the size yet that was asked for; said once, until it changes."""
    if why == job.rescale:
        return Outcome(job)
    reason = f"keeps its size for now: {why}"
    return Outcome(dataclasses.replace(job, rescale=why), (), (record(job, "RescaleWaiting", reason, at),))


def met(job: Job) -> Outcome:
    return Outcome(dataclasses.replace(job, rescale=None))


def released(job: Job, reason: str, at: float) -> Outcome:
    """What was kept for the next attempt is given up."""
    if job.kept is None:
        return Outcome(job)
    told = f"gives up the {len(job.kept.held)} slots that were kept for its next attempt: {reason}"
    after = dataclasses.replace(job, kept=None)
    return Outcome(after, (ReleaseGang(job.uid, told),), (record(after, "SlotsReleased", told, at),))


def _left(job: Job, at: float, how: str) -> Outcome:
    """The gang has ended, or is ended now; its incident is open until the next one makes a step."""
    assert job.pause is not None
    pause = job.pause
    reason = f"{how}: {pause.reason}"
    if pause.kind != "preempted":
        return _stopped(job, incidents.moved(job, pause, reason, at), Phase.RESCALING, None, at)
    fault = events.Fault("preempted", pause.reason, node=pause.node, step=job.step)
    verdict = recovery.judge(job, [fault], at)
    incident = incidents.opened(job, verdict, [fault], at)
    charged = dataclasses.replace(job, charges=recovery.charge(job.charges, verdict.cause, at))
    if verdict.restart:
        return _stopped(charged, dataclasses.replace(incident, action=reason), Phase.RESCALING, None, at)
    return _stopped(charged, incident, Phase.FINISHING, Phase.FAILED, at)


def _stopped(job: Job, incident: Incident, phase: Phase, ending: Phase | None, at: float) -> Outcome:
    keep = ending is None and incident.kind != "yielded"
    commands, changes = stop(job, incident.action, keep)
    data = incidents.told(incident)
    opened = (*job.incidents, incident)
    return move(
        job, phase, "IncidentOpened", incident.action, at, commands, data, ending=ending, incidents=opened, **changes
    )
