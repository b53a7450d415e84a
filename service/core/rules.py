"""What each event does to one job. A rule takes job, event and limits; the table says which applies.

Knows one job at a time: no queue, and no slots but the job's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from service.contracts import events
from service.contracts.job import JobSpec, Phase
from service.core import incidents, liveness, progress, recovery, saving, spares, suspending
from service.core.commands import Command, InspectGang, RaiseStandbys, Record, ReleaseGang, StartGang
from service.core.goodput import goodput
from service.core.liveness import Limits
from service.core.outcome import Outcome, move, record, stop
from service.core.state import Incident, Job, Placement, Tier
from workers.spec import ParallelLayout

REFUSED_BACKOFF_MAX_S = 60.0
NAMED_NODES = 4

PAUSED = (Phase.RESCALING, Phase.SUSPENDING, Phase.CANCELLING)  # phases of a gang that was told to end after a step

SKIPPED: Mapping[str, str] = {
    "skip": "leaves out the samples of step {step} and goes on with the next ones",
    "rollback": "goes back from step {step} to its newest checkpoint and leaves out the samples since",
    "rescale": "does step {step} again with a smaller loss scale",
}


@dataclasses.dataclass(frozen=True, slots=True)
class SlotsFound:
    """The scheduling pass found a place for the job. The core itself makes this event."""

    uid: str
    layout: ParallelLayout
    placement: Placement
    why: str
    at: float
    backfilled: bool = False  # another that comes first waits


@dataclasses.dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The job was to be over by now. The core itself makes this event."""

    uid: str
    at: float


def submitted(_: None, event: events.JobSubmitted, limits: Limits) -> Outcome:
    job = Job(event.uid, event.seq, event.spec, event.at, phase_since=event.at, project=event.project)
    reason = f"submitted, wants {event.spec.resources.slots} {event.spec.resources.device} slots"
    return move(job, Phase.QUEUED, "JobQueued", reason, event.at)


def placed(job: Job, event: SlotsFound, limits: Limits) -> Outcome:
    attempt = job.attempt + 1
    reason = f"attempt {attempt} is placed on {_where(event.placement)}; {event.why}"
    start = StartGang(job.uid, attempt, event.layout, event.placement, job.rejected, reason, job.restored)
    return move(
        job,
        Phase.PLACING,
        "GangPlaced",
        reason,
        event.at,
        (start,),
        {"attempt": attempt, "layout": str(event.layout), "parallel": event.layout.model_dump(mode="json")},
        attempt=attempt,
        layout=event.layout,
        placement=event.placement,
        kept=None,
        unraised=False,
        rescale=None,
        position=None,
        backfilled=event.backfilled,
        stale=False,
        resumed_step=None,
        resumed_manifest=None,
        progress_at=event.at,
    )


def started(job: Job, event: events.GangStarted, limits: Limits) -> Outcome:
    took = event.at - job.phase_since
    reason = f"attempt {job.attempt} has its {len(_slots(job))} ranks {took:.1f} s after it was placed"
    return move(job, Phase.STARTING, "JobStarted", reason, event.at, progress_at=event.at, refusals=0)


def refused(job: Job, event: events.GangRefused, limits: Limits) -> Outcome:
    wait, times = min(REFUSED_BACKOFF_MAX_S, 2.0 ** min(job.refusals, 10)), job.refusals + 1
    phase = Phase.RECOVERING if job.started_at is not None or job.incidents else Phase.QUEUED
    often = f"; that is {times} times in a row, though its nodes look free" if times >= limits.refusals_max else ""
    reason = f"attempt {job.attempt} was refused: {event.reason}{often}; tries again after {wait:g} s"
    return move(
        job,
        phase,
        "GangRefused",
        reason,
        event.at,
        placement=None,
        stopping=False,
        not_before=event.at + wait,
        refusals=times,
    )


def resumed(job: Job, event: events.GangResumed, limits: Limits) -> Outcome:
    source = event.manifest or ("memory" if event.step else event.weights or "the seed")
    reason = f"attempt {job.attempt} continues after step {event.step} from {source}"
    data = {"step": event.step, "manifest": event.manifest}
    line = record(job, "GangResumed", reason, event.at, data)
    tier: Tier = "storage" if event.manifest else "memory" if event.step else "seed"
    return Outcome(progress.resumed(job, event.step, event.at, event.manifest, tier), (), (line,))


def recalled(job: Job, event: events.StepsRecalled, limits: Limits) -> Outcome:
    after = progress.recalled(job, event.steps)
    if after is job:
        return Outcome(job)
    reason = f"steps up to {after.high_step} were completed before the fault; the snapshot knows of them"
    return Outcome(after, (), (record(job, "StepsRecalled", reason, event.at, {"step": after.high_step}),))


def stepped(job: Job, event: events.StepsCompleted, limits: Limits) -> Outcome:
    """Also of an attempt that is being stopped: its steps are completed, and count."""
    after = progress.completed(job, event.steps, event.at)
    over = _closed(job, after, event.at)
    if job.phase not in (Phase.PLACING, Phase.STARTING):
        return Outcome(after, (), over)
    first = event.steps[0]
    reason = f"attempt {job.attempt} completed step {first.step} of {job.spec.train.steps}"
    after = dataclasses.replace(after, unraised=True)
    running = move(after, Phase.RUNNING, "JobRunning", reason, event.at, data={"step": first.step})
    return Outcome(running.job, (), running.records + over)


def faulted(job: Job, event: events.GangFaulted, limits: Limits) -> Outcome:
    """Not of a gang that has ended by itself, and waits for its next slots in the phase that it had."""
    return Outcome(job) if _leaves(job) else _broken(job, event.faults, event.at)


def health_found(job: Job, event: events.HealthFound, limits: Limits) -> Outcome:
    """A node that the job stands on asks for something. One that is to be drained, the scheduling pass leaves."""
    if event.action not in ("restart", "reboot") or _leaves(job):
        data = {"node": event.node, "action": event.action, "devices": event.devices}
        reason = f"node {event.node} asks for {event.action}: {event.message}"
        return Outcome(job, (), (record(job, "HealthFound", reason, event.at, data),))
    fault = events.Fault("device", event.message, node=event.node, step=job.step)
    return _broken(job, [fault], event.at)


def fleet_observed(job: Job, event: events.FleetObserved, limits: Limits) -> Outcome:
    if _leaves(job) or job.placement is None:
        return Outcome(job)
    alive = {node.id for node in event.fleet.nodes}
    gone = dict.fromkeys((slot.node, slot.name) for slot in job.placement.slots if slot.node not in alive)
    faults = [_node_lost(name, job.step, node in event.announced) for node, name in gone]
    if faults:
        return _broken(job, faults, event.at)
    left = spares.left(job.placement, event.fleet)
    if left is job.placement:
        return Outcome(job)
    names = sorted({slot.name for slot in job.placement.spares} - {slot.name for slot in left.spares})
    reason = f"spare {' and '.join(names)} is gone from the fleet; the gang does not stand on it"
    return Outcome(dataclasses.replace(job, placement=left), (), (record(job, "SpareLost", reason, event.at),))


def ticked(job: Job, event: events.Ticked, limits: Limits) -> Outcome:
    """A gang at work that stands still is looked at before it is broken, for a while."""
    fault = liveness.overdue(job, event.at, limits)
    if fault is None:
        return Outcome(job)
    if job.phase is Phase.RUNNING and job.inspected_at <= job.progress_at:
        first, _, numbers = fault.message.partition("\n")
        line = record(job, "GangInspected", f"{first}: looks who is waited for; {numbers}", event.at)
        look = InspectGang(job.uid, job.attempt, first)
        return Outcome(dataclasses.replace(job, inspected_at=event.at), (look,), (line,))
    if job.phase is Phase.RUNNING and event.at - job.inspected_at <= limits.inspecting_s:
        return Outcome(job)
    return _broken(job, [fault], event.at)


def warmed(job: Job, event: events.StandbysWarm, limits: Limits) -> Outcome:
    """Shown, and no line in the log."""
    return Outcome(dataclasses.replace(job, standbys=event.warm))


def straggled(job: Job, event: events.StragglerFound, limits: Limits) -> Outcome:
    data = {"node": event.node, "rank": event.rank, "ranks": event.ranks, "factor": round(event.factor, 2)}
    return Outcome(job, (), (record(job, "StragglerFound", slowness(event), event.at, data),))


def slowness(event: events.StragglerFound) -> str:
    who = f"rank {event.rank}" if event.ranks == 1 else f"{event.ranks} ranks"
    return f"{who} on {event.node} take {event.factor:.1f} times as long as the others for the same piece of work"


def finished(job: Job, event: events.GangFinished, limits: Limits) -> Outcome:
    if _leaves(job):
        return Outcome(job)
    reason = f"attempt {job.attempt} {_done(job, 'completed ')}"
    after = job
    if job.resumed_step is None:  # it went from loading to its end: nothing was left to do
        after = progress.resumed(job, progress.last_step(job), event.at)
    after = dataclasses.replace(after, incidents=incidents.closed(after.incidents, job.attempt, event.at))
    commands, changes = stop(job, reason, keep=False)
    moved = move(
        after,
        Phase.FINISHING,
        "JobFinishing",
        reason,
        event.at,
        commands,
        ending=Phase.SUCCEEDED,
        **changes,
    )
    return dataclasses.replace(moved, records=moved.records + _closed(job, after, event.at))


def freed(job: Job, event: events.GangStopped | events.GangRefused, limits: Limits) -> Outcome:
    """The slots of an attempt that was being stopped are free, or kept for the next. Said twice is said once."""
    if job.placement is None:
        return Outcome(job)
    kept = job.placement if job.keeping and isinstance(event, events.GangStopped) else None
    after = dataclasses.replace(job, placement=None, kept=kept, stopping=False, keeping=False, pause=None)
    if job.ending is not None:
        return _ended(after, job.ending, event.at)
    then = "are kept for the next" if kept else "are free"
    reason = f"attempt {job.attempt} has stopped and its {len(_slots(job))} slots {then}"
    return Outcome(after, (), (record(job, "GangStopped", reason, event.at),))


def cancelled(job: Job, event: events.CancelRequested, limits: Limits) -> Outcome:
    if job.placement is None:
        return _ended(job, Phase.CANCELLED, event.at)
    if event.graceful and job.phase is Phase.RUNNING:
        return suspending.ending(job, "cancel requested", Phase.CANCELLING, Phase.CANCELLED, event.at, limits)
    if job.phase is Phase.CANCELLING and (event.graceful or job.stopping):
        return Outcome(job)
    reason = f"cancel requested after step {job.step}; waits until its {len(_slots(job))} slots are free"
    commands, changes = stop(job, reason, keep=False)
    return move(
        job,
        Phase.CANCELLING,
        "JobCancelling",
        reason,
        event.at,
        commands,
        ending=Phase.CANCELLED,
        **changes,
    )


def expired(job: Job, event: DeadlinePassed, limits: Limits) -> Outcome:
    """It ends as failed; a gang at work after the step under way, which is in storage."""
    reason = f"its deadline of {job.spec.deadline_s:g} s passed after step {job.step} of {job.spec.train.steps}"
    if job.placement is None:
        return _ended(dataclasses.replace(job, reason=reason), Phase.FAILED, event.at)
    if job.phase is Phase.RUNNING:
        return suspending.ending(job, reason, Phase.CANCELLING, Phase.FAILED, event.at, limits)
    commands, changes = stop(job, reason, keep=False)
    return move(job, Phase.CANCELLING, "JobCancelling", reason, event.at, commands, ending=Phase.FAILED, **changes)


def skipped(job: Job, event: events.StepSkipped, limits: Limits) -> Outcome:
    """A gang at work that goes back is one that starts: it loads, and says where it continues."""
    reason = f"attempt {job.attempt} {SKIPPED[event.action].format(step=event.step)}: {event.reason}"
    data = {"step": event.step, "action": event.action, "samples": event.samples}
    after = progress.seen(job, event.at)
    if job.phase is Phase.RUNNING and event.action == "rollback":
        return move(after, Phase.STARTING, "StepSkipped", reason, event.at, data=data, resumed_step=None)
    return Outcome(after, (), (record(job, "StepSkipped", reason, event.at, data),))


def spiked(job: Job, event: events.LossSpiked, limits: Limits) -> Outcome:
    first, end = event.samples
    reason = (
        f"loss {event.loss:.4f} of step {event.step} is a spike: {event.usual:.4f} is usual, up to {event.bound:.4f}; "
        f"its samples are {first} to {end - 1}"
    )
    data = {"step": event.step, "loss": event.loss, "usual": event.usual, "bound": event.bound}
    line = record(job, "LossSpiked", reason, event.at, {**data, "samples": [first, end]})
    return Outcome(progress.seen(job, event.at), (), (line,))


def evaluated(job: Job, event: events.Evaluated, limits: Limits) -> Outcome:
    reason = f"evaluation after step {event.step}: loss {event.loss:.4f} over {event.tokens} tokens"
    if len(event.sources) > 1:
        reason += f" ({', '.join(f'{name} {loss:.4f}' for name, loss, _ in event.sources)})"
    if event.best is not None:
        reason += (
            ", the best so far" if event.worse == 0 else f"; {event.best[1]:.4f} after step {event.best[0]} is best"
        )
    data = {"step": event.step, "loss": event.loss, "tokens": event.tokens, "sources": event.sources}
    line = record(job, "Evaluated", reason, event.at, data)
    return Outcome(progress.evaluated(job, event), (), (line,))


def changed(job: Job, event: events.SpecChanged, limits: Limits) -> Outcome:
    """What ranks were told of how they save, a gang at work hears by being started again."""
    if event.generation <= job.generation:
        return Outcome(job)
    stale = job.stale or (job.placement is not None and _told(job.spec) != _told(event.spec))
    names = [name for name in type(job.spec).model_fields if getattr(job.spec, name) != getattr(event.spec, name)]
    after = dataclasses.replace(job, spec=event.spec, generation=event.generation, stale=stale)
    reason = f"{' and '.join(names) or 'nothing'} changed by request; generation {event.generation} of its spec"
    return Outcome(after, (), (record(after, "SpecChanged", reason, event.at, {"generation": event.generation}),))


def waiting(job: Job, reason: str, at: float) -> Outcome:
    """Why the job still has no gang; said once, until it changes."""
    if reason == job.reason:
        return Outcome(job)
    return Outcome(dataclasses.replace(job, reason=reason), (), (record(job, "JobWaiting", reason, at),))


def backed(job: Job, placement: Placement, why: str, at: float) -> Outcome:
    """Standbys behind a gang that begins, and other spares than it had."""
    after = dataclasses.replace(job, placement=placement)
    lines: tuple[Record, ...] = ()
    if job.placement is not None and placement.spares != job.placement.spares:
        names = list(dict.fromkeys(slot.name for slot in placement.spares))
        reason = f"spare nodes are {', '.join(names) if names else 'none'} now{why and ': '}{why}"
        lines = (record(job, "SparesChanged", reason, at, {"nodes": names}),)
    if job.phase is Phase.RUNNING:
        after = dataclasses.replace(after, unraised=False)
    if job.phase is not Phase.RUNNING or job.layout is None or not job.spec.resources.standbys:
        return Outcome(after, (), lines)
    raised = RaiseStandbys(job.uid, job.attempt, job.layout, placement)
    return Outcome(after, (raised,), lines)


def _leaves(job: Job) -> bool:
    """Whether a gang that moves has ended, or is ended: what is said of it now is no fault."""
    return job.phase in PAUSED and (job.stopping or job.placement is None)


def _told(spec: JobSpec) -> tuple[object, ...]:
    """What of its checkpoints a rank is told."""
    return spec.checkpoint.every_steps, spec.checkpoint.snapshot_every


def _node_lost(name: str, step: int, announced: bool) -> events.Fault:
    if announced:
        return events.Fault("preempted", f"node {name} is gone, as it was said to go", node=name, step=step)
    return events.Fault("node_lost", f"node {name} is gone from the fleet", node=name, step=step)


def _broken(job: Job, faults: Sequence[events.Fault], at: float) -> Outcome:
    verdict = recovery.judge(job, faults, at)
    incident = incidents.opened(job, verdict, faults, at)
    passed = saving.quarantined(job, at) if verdict.quarantine else Outcome(job)
    commands, changes = stop(job, verdict.reason, keep=verdict.restart)
    moved = move(
        passed.job,
        Phase.RECOVERING if verdict.restart else Phase.FINISHING,
        "IncidentOpened",
        verdict.reason,
        at,
        commands,
        incidents.told(incident),
        ending=None if verdict.restart else Phase.FAILED,
        not_before=verdict.not_before,
        incidents=(*job.incidents, incident),
        charges=recovery.charge(job.charges, verdict.cause, at),
        **changes,
    )
    return dataclasses.replace(moved, records=moved.records + passed.records)


def _ended(job: Job, phase: Phase, at: float) -> Outcome:
    elapsed = at - job.submitted_at
    reasons = {
        Phase.SUCCEEDED: f"{_done(job)} in {elapsed:.1f} s, "
        f"goodput {goodput(job.productive_s, job.submitted_at, at):.2f}{_unsaved(job)}",
        Phase.FAILED: job.reason,
        Phase.CANCELLED: f"cancelled after step {job.step} by request; it holds no slots",
    }
    free: tuple[Command, ...] = (ReleaseGang(job.uid, reasons[phase]),) if job.kept else ()
    over = dataclasses.replace(job, kept=None, pause=None, ended_at=at)
    return move(over, phase, f"Job{phase.capitalize()}", reasons[phase], at, free)


def _done(job: Job, verb: str = "") -> str:
    """What a job that succeeded did."""
    asked, steps = job.spec.eval, job.spec.train.steps
    if job.spec.evaluates_only:
        loss = "no number" if job.eval_loss is None else f"{job.eval_loss:.4f}"
        return f"evaluated step {job.step}: loss {loss}"
    if not progress.ends_early(job) or asked is None or job.eval_best is None:
        return f"{verb}all {steps} steps"
    best = f"{job.eval_best[1]:.4f} after step {job.eval_best[0]}"
    return f"stopped after step {job.step} of {steps}, {asked.patience} evaluations without a better one than {best},"


def _unsaved(job: Job) -> str:
    """That the last checkpoint could not be written is no failure, and nothing to be silent about."""
    if job.checkpoint_step == progress.last_step(job) or job.spec.evaluates_only:
        return ""
    newest = "there is no checkpoint" if job.checkpoint_step is None else f"the newest is of step {job.checkpoint_step}"
    return f"; its last checkpoint was not written, {newest}"


def _closed(before: Job, after: Job, at: float) -> tuple[Record, ...]:
    """A record of each incident that is over now."""
    still_open = {incident.number for incident in before.incidents if incident.recover_s is None}
    over = [i for i in after.incidents if i.number in still_open and i.recover_s is not None]
    return tuple(record(after, "IncidentClosed", _recovery(i), at, incidents.told(i)) for i in over)


def _recovery(incident: Incident) -> str:
    return (
        f"incident {incident.number} ({incident.kind}) is over {incident.recover_s:.2f} s after the fault; "
        f"detected in {incident.detect_s:.2f} s, {incident.steps_redone or 0} steps redone"
    )


def _slots(job: Job) -> tuple[Any, ...]:
    return job.placement.slots if job.placement else ()


def _where(placement: Placement) -> str:
    names = list(dict.fromkeys(slot.name for slot in placement.slots))
    more = f" and {len(names) - NAMED_NODES} more" if len(names) > NAMED_NODES else ""
    return f"{len(names)} node{'s' if len(names) > 1 else ''} ({', '.join(names[:NAMED_NODES])}{more})"
