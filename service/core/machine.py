"""The state machine of a job, as a table, and the one entrance of the core: `decide`.

    queued      has no gang; waits for slots
    placing     StartGang is ordered; its slots are held
    starting    every rank has its process; they load, the first time or again, and make their first step
    running     steps complete
    rescaling   PauseGang is ordered: the gang ends after a step, to go on at another size or on other nodes. Once it
                has ended and its slots are free, waits for its turn like a recovering job
    suspending  its gang is to end, with its state in storage: by request, or to yield its slots
    suspended   by request; holds nothing, and waits for nothing but its user
    recovering  the attempt broke. StopGang is ordered; once the slots are free, waits for its turn like a
                queued job, but before all of those
    finishing   the outcome is known (`ending`); StopGang is ordered, the slots are not free yet
    cancelling  as finishing, by request
    succeeded, failed, cancelled   over; nothing is held

An event finds its rule by (phase, event type). A pair that is expected and means nothing is in IGNORED,
with why. Any other pair is a broken promise of the runtime and raises IllegalTransition: a refused attempt
that shows life, a gang that stopped without an order. Two rules come before the table: an event of a job
that is not known is dropped (it was terminal, and forgotten) unless it tells of a checkpoint, which is logged;
and so is a gang event of any attempt but the job's newest.

FleetObserved and Ticked go to every job, HealthFound to those that stand on the node. After every event the
scheduling pass offers free slots to the waiting jobs, in the order of `queue`; what it finds comes to the table as
SlotsFound. Which gangs are to move it tells by MoveDecided, and which are to give all their slots by YieldDecided.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from service.contracts import events
from service.contracts.errors import PhalanxError
from service.contracts.job import Phase
from service.core import (
    accounts,
    checkpoints,
    conditions,
    health,
    liveness,
    moving,
    rules,
    saving,
    scheduling,
    suspending,
)
from service.core.commands import Command, Decision, Record
from service.core.liveness import Limits
from service.core.moving import MoveDecided
from service.core.outcome import Outcome
from service.core.rules import DeadlinePassed, SlotsFound
from service.core.state import Job, State
from service.core.suspending import YieldDecided

QUEUED, PLACING, STARTING, RUNNING = Phase.QUEUED, Phase.PLACING, Phase.STARTING, Phase.RUNNING
SUSPENDING, SUSPENDED = Phase.SUSPENDING, Phase.SUSPENDED
RESCALING, RECOVERING, FINISHING, CANCELLING = Phase.RESCALING, Phase.RECOVERING, Phase.FINISHING, Phase.CANCELLING
SUCCEEDED, FAILED, CANCELLED = Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED

LIVE = (QUEUED, PLACING, STARTING, RUNNING, RESCALING, SUSPENDING, SUSPENDED, RECOVERING, FINISHING, CANCELLING)
GANG = (PLACING, STARTING, RUNNING)  # a gang works, or is about to
MOVING = (*GANG, RESCALING)  # or works until its pause
LEAVING = (SUSPENDING, CANCELLING)  # works until its pause, or is stopped, and does not come back at once
STOPPING = (RECOVERING, FINISHING, CANCELLING)
TERMINAL = (SUCCEEDED, FAILED, CANCELLED)

FREED = (events.GangStopped, events.GangRefused)  # each says that nothing of the attempt holds a slot
REQUESTS = typing.get_args(events.Request)
FACTS = (
    events.CheckpointVerified,
    events.CheckpointCheckFailed,
    events.CheckpointExported,
    events.CheckpointExportFailed,
)
ASIDE = (events.StandbysWarm, events.StragglerFound)
LATE = (events.GangStarted, events.GangResumed, events.GangFaulted, events.GangFinished, *ASIDE)

Own = SlotsFound | MoveDecided | YieldDecided | DeadlinePassed  # events that the core makes
Pair = tuple[Phase | None, type]


class IllegalTransition(PhalanxError):
    """An event that can't happen in this phase."""

    code = "illegal_transition"


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    apply: Callable[[Any, Any, Limits], Outcome]
    targets: tuple[Phase, ...] = ()  # phases it may lead to, besides the one it is in


TABLE: Mapping[Pair, Rule] = MappingProxyType({
    (None, events.JobSubmitted): Rule(rules.submitted, (QUEUED,)),
    (QUEUED, SlotsFound): Rule(rules.placed, (PLACING,)),
    (RECOVERING, SlotsFound): Rule(rules.placed, (PLACING,)),
    (RESCALING, SlotsFound): Rule(rules.placed, (PLACING,)),
    (PLACING, events.GangStarted): Rule(rules.started, (STARTING,)),
    (PLACING, events.GangRefused): Rule(rules.refused, (QUEUED, RECOVERING)),
    **{(phase, events.StepsCompleted): Rule(rules.stepped, (RUNNING,)) for phase in (PLACING, STARTING)},
    **{(phase, events.StepsCompleted): Rule(rules.stepped) for phase in (RUNNING, RESCALING)},
    **{(phase, events.StepsCompleted): Rule(rules.stepped) for phase in STOPPING},
    **{(phase, events.StepsRecalled): Rule(rules.recalled) for phase in (PLACING, STARTING, SUSPENDING, *STOPPING)},
    **{(phase, events.GangResumed): Rule(rules.resumed) for phase in (PLACING, STARTING)},
    **{(phase, events.GangFinished): Rule(rules.finished, (FINISHING,)) for phase in MOVING},
    **{(phase, events.GangFaulted): Rule(rules.faulted, (RECOVERING, FINISHING)) for phase in MOVING},
    **{(phase, events.FleetObserved): Rule(rules.fleet_observed, (RECOVERING, FINISHING)) for phase in MOVING},
    **{(phase, events.HealthFound): Rule(rules.health_found, (RECOVERING, FINISHING)) for phase in MOVING},
    **{(phase, events.Ticked): Rule(rules.ticked, (RECOVERING, FINISHING)) for phase in GANG},
    (RUNNING, MoveDecided): Rule(moving.pausing, (RESCALING,)),
    (RUNNING, events.RestartRequested): Rule(moving.restarting, (RESCALING,)),
    (RESCALING, events.Ticked): Rule(moving.ticked, (FINISHING,)),
    (RESCALING, events.GangPaused): Rule(moving.paused, (FINISHING,)),
    **{(phase, events.RescaleRequested): Rule(moving.requested)
       for phase in (QUEUED, RECOVERING, SUSPENDING, SUSPENDED, *MOVING)},
    (RUNNING, YieldDecided): Rule(suspending.yielding, (SUSPENDING,)),
    **{(phase, events.SuspendRequested): Rule(suspending.requested, (SUSPENDED,)) for phase in (QUEUED, SUSPENDED)},
    **{(phase, events.SuspendRequested): Rule(suspending.requested, (SUSPENDING,)) for phase in (*GANG, SUSPENDING)},
    **{(phase, events.SuspendRequested): Rule(suspending.requested, (SUSPENDING, SUSPENDED))
       for phase in (RECOVERING, RESCALING)},
    (SUSPENDING, events.ResumeRequested): Rule(suspending.resumed),
    (SUSPENDED, events.ResumeRequested): Rule(suspending.resumed, (QUEUED,)),
    (SUSPENDING, events.StepsCompleted): Rule(rules.stepped),
    **{(phase, events.GangPaused): Rule(suspending.paused) for phase in LEAVING},
    **{(phase, events.GangFinished): Rule(rules.finished, (FINISHING,)) for phase in LEAVING},
    **{(phase, events.GangFaulted): Rule(suspending.faulted) for phase in LEAVING},
    **{(phase, events.FleetObserved): Rule(suspending.fleet_observed) for phase in LEAVING},
    **{(phase, events.Ticked): Rule(suspending.ticked) for phase in LEAVING},
    **{(SUSPENDING, kind): Rule(suspending.freed, (SUSPENDED, QUEUED)) for kind in FREED},
    (RUNNING, events.SaveRequested): Rule(saving.requested),
    **{(phase, events.SpecChanged): Rule(rules.changed) for phase in LIVE},
    (QUEUED, events.CancelRequested): Rule(rules.cancelled, (CANCELLED,)),
    **{(phase, events.CancelRequested): Rule(rules.cancelled, (CANCELLING,)) for phase in (*GANG, CANCELLING)},
    **{(phase, events.CancelRequested): Rule(rules.cancelled, (CANCELLING, CANCELLED))
       for phase in (RECOVERING, RESCALING)},
    (SUSPENDING, events.CancelRequested): Rule(rules.cancelled, (CANCELLING,)),
    (SUSPENDED, events.CancelRequested): Rule(rules.cancelled, (CANCELLED,)),
    **{(phase, events.RestoreRequested): Rule(saving.restored, (RECOVERING,)) for phase in MOVING},
    **{(phase, events.RestoreRequested): Rule(saving.restored)
       for phase in (QUEUED, RECOVERING, SUSPENDING, SUSPENDED)},
    **{(RECOVERING, kind): Rule(rules.freed) for kind in FREED},
    (RESCALING, events.GangStopped): Rule(rules.freed),
    **{(FINISHING, kind): Rule(rules.freed, (SUCCEEDED, FAILED)) for kind in FREED},
    **{(CANCELLING, kind): Rule(rules.freed, (CANCELLED, FAILED)) for kind in FREED},
    **{(phase, DeadlinePassed): Rule(rules.expired, (FAILED,)) for phase in (QUEUED, SUSPENDED)},
    **{(phase, DeadlinePassed): Rule(rules.expired, (CANCELLING,)) for phase in (*GANG, SUSPENDING)},
    **{(phase, DeadlinePassed): Rule(rules.expired, (CANCELLING, FAILED)) for phase in (RECOVERING, RESCALING)},
    **{(phase, events.CheckpointPublished): Rule(saving.published) for phase in LIVE},
    **{(phase, events.CheckpointRejected): Rule(saving.rejected) for phase in Phase},
    **{(phase, kind): Rule(saving.told) for phase in Phase for kind in FACTS},
    **{(phase, kind): Rule(saving.unsaved) for phase in LIVE for kind in saving.UNSAVED},
    **{(phase, events.SnapshotHeld): Rule(saving.snapshot_held) for phase in LIVE},
    **{(phase, events.StandbysWarm): Rule(rules.warmed) for phase in MOVING},
    **{(phase, events.StragglerFound): Rule(rules.straggled) for phase in (STARTING, RUNNING, RESCALING)},
    (RUNNING, events.StepSkipped): Rule(rules.skipped, (STARTING,)),
    **{(phase, events.StepSkipped): Rule(rules.skipped)
       for phase in (PLACING, STARTING, RESCALING, SUSPENDING, *STOPPING)},
    **{(phase, events.Evaluated): Rule(rules.evaluated) for phase in (*MOVING, SUSPENDING, *STOPPING)},
    **{(phase, events.LossSpiked): Rule(rules.spiked) for phase in (*MOVING, SUSPENDING, *STOPPING)},
})  # fmt: skip

IGNORED: Mapping[Pair, str] = MappingProxyType({
    **{(phase, events.JobSubmitted): "submitted twice is submitted once" for phase in Phase},
    **{(phase, events.FleetObserved): "no gang to lose" for phase in Phase if phase not in (*MOVING, *LEAVING)},
    **{(phase, events.HealthFound): "nothing works on the node, or not for long" for phase in Phase
       if phase not in MOVING},
    **{(phase, events.Ticked): "nothing whose progress is awaited" for phase in Phase
       if phase not in (*MOVING, *LEAVING)},
    **{(SUSPENDING, kind): "the attempt ends"
       for kind in (events.GangStarted, events.GangResumed, *ASIDE)},
    **{(SUSPENDED, kind): "it holds nothing any more" for kind in (events.GangFaulted, *FREED, *ASIDE)},
    **{(phase, events.ResumeRequested): "it is not suspended" for phase in LIVE
       if phase not in (SUSPENDING, SUSPENDED)},
    **{(phase, kind): "no step is under way" for phase in LIVE if phase is not RUNNING
       for kind in (events.SaveRequested, events.RestartRequested)},
    **{(phase, events.GangStarted): "an adopted gang says it again" for phase in (STARTING, RUNNING, RESCALING)},
    **{(phase, events.StepsRecalled): "the first completed step came after them" for phase in (RUNNING, RESCALING)},
    **{(phase, events.GangResumed): "the first completed step has told it" for phase in (RUNNING, RESCALING)},
    **{(phase, events.GangPaused): "it is stopped already, for another reason" for phase in (RECOVERING, FINISHING)},
    **{(phase, kind): "the attempt is being stopped" for phase in STOPPING for kind in LATE
       if (phase, kind) not in TABLE},
    **{(QUEUED, kind): "the attempt was refused; who stood by is ended" for kind in ASIDE},
    (PLACING, events.StragglerFound): "it makes no steps yet",
    (QUEUED, events.GangFaulted): "the attempt was refused; nothing is left to break",
    (QUEUED, events.GangStopped): "the attempt was refused; its slots are free already",
    (QUEUED, events.GangRefused): "refused twice is refused once",
    (FINISHING, events.CancelRequested): "too late: the outcome is known",
    **{(phase, kind): "too late: the job ends"
       for phase in (FINISHING, CANCELLING)
       for kind in (events.RestoreRequested, events.RescaleRequested, events.SuspendRequested)},
    **{(phase, kind): "the job is over and holds nothing"
       for phase in TERMINAL for kind in (*REQUESTS, *typing.get_args(events.GangEvent))},
})  # fmt: skip


def decide(state: State, event: events.Event, limits: Limits = liveness.DEFAULT) -> Decision:
    """The state after `event`, what is to be done, and the log rows that say why; or IllegalTransition."""
    turn = _Turn(state, event.at, limits)
    if isinstance(event, events.FleetObserved):
        event = turn.observe(event)
    if isinstance(event, events.SharesObserved):
        turn.queues, turn.quotas = event.queues, event.quotas
    if isinstance(event, events.FleetObserved | events.Ticked):
        for job in sorted(state.jobs.values(), key=lambda job: job.seq):
            turn.tell(job, event)
        turn.expire()
    elif isinstance(event, events.NodeEvent):
        turn.examine(event)
    elif not isinstance(event, events.SharesObserved):
        _address(turn, event)
    scheduling.run(turn, event)
    return turn.decision()


class _Turn:
    """What one event has changed so far."""

    def __init__(self, state: State, at: float, limits: Limits) -> None:
        self.jobs, self.fleet, self.at, self.limits = dict(state.jobs), state.fleet, at, limits
        self.health, self.since = state.health, state.since
        self.queues, self.quotas = state.queues, state.quotas
        self.commands: list[Command] = []
        self.records: list[Record] = []

    def tell(self, job: Job | None, event: events.Event | Own) -> None:
        pair = (job.phase if job else None, type(event))
        rule = TABLE.get(pair)
        if rule is not None:
            outcome = rule.apply(job, event, self.limits)
            self.take(dataclasses.replace(outcome, job=accounts.counted(job, outcome.job, self.at)))
            self._blame(job, outcome.job, event)
        elif pair not in IGNORED:
            uid = job.uid if job else getattr(event, "uid", "no job")
            raise IllegalTransition(
                f"{type(event).__name__} can't happen to job {uid} in phase {job.phase if job else 'none'}",
                hint="a pair of phase and event belongs in TABLE or, with why, in IGNORED",
            )

    def take(self, outcome: Outcome) -> None:
        self.jobs[outcome.job.uid] = conditions.counted(self.jobs.get(outcome.job.uid), outcome.job, self.at)
        self.commands += outcome.commands
        self.records += outcome.records

    def observe(self, event: events.FleetObserved) -> events.FleetObserved:
        """The fleet as it is now; with the event, which gone nodes were said to go."""
        before, self.fleet = self.fleet, event.fleet
        self.health = health.observed(self.health, before, event.fleet, self.at, self.limits)
        since = {node.id: self.since.get(node.id, self.at) for node in event.fleet.nodes}
        self.since = self.since if since == self.since else MappingProxyType(since)
        announced = {node.id for node in before.nodes if node.draining is not None}
        return dataclasses.replace(event, announced=event.announced | announced)

    def expire(self) -> None:
        """Jobs whose deadline has passed are to end."""
        for job in sorted(self.jobs.values(), key=lambda job: job.seq):
            late = job.spec.deadline_s is not None and self.at - job.submitted_at > job.spec.deadline_s
            if late and (job.phase, DeadlinePassed) in TABLE:
                self.tell(job, DeadlinePassed(job.uid, self.at))

    def examine(self, event: events.NodeEvent) -> None:
        """Remember what is said of a node, and tell those who stand on it; of one storm, once."""
        known = self.health.get(event.node, health.CLEAN)
        self.health = health.found(self.health, event, self.limits)
        if not isinstance(event, events.HealthFound):
            return
        if event.action == "restart" and not health.restarts(known, self.at, self.limits):
            event = dataclasses.replace(event, action="log")
        for job in sorted(self.jobs.values(), key=lambda job: job.seq):
            if job.placement and any(slot.name == event.node for slot in job.placement.slots):
                self.tell(job, event)

    def _blame(self, before: Job | None, after: Job, event: object) -> None:
        """Hold against nodes what they are to blame for."""
        for incident in after.incidents[len(before.incidents) if before else 0 :]:
            self.health = health.blamed(self.health, incident, self.at, self.limits)
        if isinstance(event, events.StragglerFound) and after.spec.placement.stragglers == "move":
            drain = events.HealthFound(event.node, "drain", rules.slowness(event), self.at)
            self.health = health.found(self.health, drain, self.limits)
        if isinstance(event, events.GangRefused) and event.node and after.refusals >= self.limits.refusals_max:
            self.health = health.refused(self.health, event.node, self.at, self.limits)

    def decision(self) -> Decision:
        state = State(MappingProxyType(self.jobs), self.fleet, self.health, self.since, self.queues, self.quotas)
        return Decision(state, tuple(self.commands), tuple(self.records))


def _address(turn: _Turn, event: events.JobEvent) -> None:
    """Tell the job that the event names, unless it is forgotten or the message late."""
    job = turn.jobs.get(event.uid)
    if job is None and isinstance(event, events.CheckpointFact):
        turn.records.append(checkpoints.record(event))
        return
    if job is None and not isinstance(event, events.JobSubmitted):
        return
    if isinstance(event, events.GangEvent) and job is not None and event.attempt != job.attempt:
        return
    turn.tell(job, event)


def edges() -> dict[tuple[Phase | None, Phase], list[str]]:
    """Names of the events on each edge from phase to phase, in table order; None is before submission."""
    found: dict[tuple[Phase | None, Phase], list[str]] = {}
    for (phase, kind), rule in TABLE.items():
        for target in rule.targets:
            found.setdefault((phase, target), []).append(kind.__name__)
    return found


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = [f"    {start or '[*]'} --> {end}: {', '.join(kinds)}" for (start, end), kinds in edges().items()]
    return "\n".join(["stateDiagram-v2", *lines, *(f"    {phase} --> [*]" for phase in TERMINAL)])
