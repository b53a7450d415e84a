"""A job on a fleet that fails, in virtual time: what `decide` orders is answered after the time that it takes.

Knows when machines fail before the controller does; the controller is told as late as detection takes. Nothing here
chooses what follows a fault: the commands do. Steps are not events: the core is told of them when a fault, a first new
step or the end makes it matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

from service.contracts import events
from service.contracts.cluster import Node
from service.contracts.job import JobSpec
from service.core import health, liveness, machine
from service.core.commands import Decision, InspectGang, PauseGang, Record, StartGang, StopGang
from service.core.liveness import Limits
from service.core.state import Job, State
from service.sim import clock
from service.sim.clock import Agenda
from service.sim.faults import Failure
from service.sim.fleet import Machines
from service.sim.gang import Gang, Kept
from service.sim.ledger import Ledger, Span, Use
from service.sim.pace import Pace
from service.sim.phases import Phases
from service.sim.stretch import Stall, Stretch

UID = "job"
FORGIVEN = clock.DAY
"""After which an operator has looked at a node that was excluded, and takes it in again."""

Decide = Callable[[State, events.Event, Limits], Decision]


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """All that a simulation depends on."""

    spec: JobSpec
    nodes: Sequence[Node]
    failures: Sequence[Failure]
    until: int  # microseconds; the job was submitted at 0
    pace: Pace
    phases: Phases
    snapshot: Stall
    checkpoint: Stall
    room: int | None = None  # slots that could be used, where a policy wants fewer

    @property
    def limits(self) -> Limits:
        """As where somebody has set them for a start that takes so long."""
        phases, usual = self.phases, liveness.DEFAULT
        load_s = phases.load_s(sum(node.slots for node in self.nodes), from_memory=False)
        return dataclasses.replace(
            usual,
            placing_s=max(usual.placing_s, 2 * (phases.stop_s + phases.start_s)),
            starting_s=max(usual.starting_s, 2 * load_s),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    job: Job  # as the core knows it at the end
    end: int  # microseconds
    ledger: Ledger
    records: Sequence[Record]
    from_memory: int  # attempts that continued at a snapshot
    grown: int  # attempts that were ended for another size


def run(scenario: Scenario, decide: Decide = machine.decide) -> Result:
    return _Simulation(scenario, decide).run()


class _Simulation:
    def __init__(self, scenario: Scenario, decide: Decide) -> None:
        self.limits = scenario.limits
        self.given, self.decide = scenario, decide
        self.agenda, self.machines = Agenda(), Machines(scenario.nodes)
        self.wanted = scenario.pace.full.world
        self.ledger = Ledger(self.machines.total, self.wanted, scenario.room)
        self.state, self.records = State(), list[Record]()
        self.gang: Gang | None = None
        self.kept = Kept()
        self.high = 0  # highest step ever completed
        self.back: dict[int, int] = {}  # index of a node that is down -> when it is up again
        self.awaited = 0.0  # the back-off that a tick was put down for
        self.counted = 0  # up to when the ledger has counted
        self.from_memory = 0

    def run(self) -> Result:
        for failure in self.given.failures:
            if failure.at <= 0:
                self._down(failure)
            else:
                self.agenda.at(failure.at, partial(self._fails, failure))
        self.machines.notice(0)
        self._tell(events.FleetObserved(self.machines.seen(), 0.0))
        self._submit()
        self.agenda.run(self.given.until, lambda: self.job.phase.terminal)
        self._count()
        self._catch_up()
        grown = sum(incident.kind == "rescale" for incident in self.job.incidents)
        return Result(self.job, self.agenda.now, self.ledger, self.records, self.from_memory, grown)

    @property
    def job(self) -> Job:
        return self.state.jobs[UID]

    @property
    def now(self) -> float:
        return clock.seconds(self.agenda.now)

    # What happens to machines

    def _fails(self, failure: Failure) -> None:
        self._count()
        gang = self.gang
        if gang is not None:
            self.kept.save(gang, self.agenda.now, self.given.snapshot.every, self.given.checkpoint.every)
        node = self.machines.nodes[failure.node]
        if failure.kind == "node":
            self._down(failure)
            self.agenda.after(clock.us(self.given.phases.detect_node_s), self._observe)
        if gang is not None and self._works(gang) and node.id in gang.ranks:
            self._breaks(gang, node, failure)

    def _down(self, failure: Failure) -> None:
        """Its machine is down, or longer than it would have been."""
        if self.machines.up(failure.node):
            self.kept.lost.add(self.machines.nodes[failure.node].id)
            self.machines.lose(failure.node, self.agenda.now)
            self.agenda.at(failure.back, partial(self._comes_back, failure.node))
        self.back[failure.node] = max(failure.back, self.back.get(failure.node, 0))

    def _comes_back(self, index: int) -> None:
        if self.back[index] > self.agenda.now:
            self.agenda.at(self.back[index], partial(self._comes_back, index))
            return
        self._count()
        del self.back[index]
        self.machines.restore(index)
        self._tell(events.FleetObserved(self.machines.seen(), self.now))
        self._look_again(self.machines.nodes[index].name)

    def _look_again(self, name: str) -> None:
        """When a node that came back may be used, and when a gang may grow onto it."""
        own = self.state.health.get(name, health.CLEAN)
        if own.excluded:
            self.agenda.after(FORGIVEN, partial(self._forgive, name))
        for wait_s in {health.settle_s(own, self.now, self.limits), own.cooldown_until - self.now}:
            if wait_s > 0:
                self.agenda.after(clock.us(wait_s) + 1, self._tick)

    def _forgive(self, name: str) -> None:
        self._tell(events.NodeForgiven(name, self.now))

    def _breaks(self, gang: Gang, node: Node, failure: Failure) -> None:
        if gang.stretch is not None:
            self.ledger.lost(gang.stretch.unfinished(self.agenda.now), gang.speed)
        gang.broken_at = self.agenda.now
        if failure.kind == "process":
            self.agenda.after(clock.us(self.given.phases.detect_process_s), partial(self._noticed, gang, node, failure))
        elif failure.kind == "hang":
            self._catch_up()
            if self.job.pause is not None:
                return  # the pause has a limit of its own
            allowed = liveness.limit(self.job.phase, self.job, self.limits)
            self.agenda.at(clock.us(self.job.progress_at + allowed) + 1, partial(self._overdue, gang))

    # What the controller comes to know

    def _observe(self) -> None:
        if self.machines.notice(self.agenda.now - clock.us(self.given.phases.detect_node_s)):
            self._tell(events.FleetObserved(self.machines.seen(), self.now))

    def _noticed(self, gang: Gang, node: Node, failure: Failure) -> None:
        if self.gang is gang and not gang.stopping:
            step = gang.completed(self.agenda.now)
            message = f"{failure.cause or 'a process ended'} on {node.name}"
            fault = events.Fault("process_died", message, gang.ranks[node.id], node.name, step)
            self._tell(events.GangFaulted(UID, gang.order.attempt, (fault,), self.now))

    def _overdue(self, gang: Gang) -> None:
        if self.gang is gang and not gang.stopping:
            self._tell(events.Ticked(self.now))

    def _catch_up(self) -> None:
        """Tell the steps that the core does not know of, and what was saved since."""
        gang = self.gang
        if gang is None or gang.stretch is None or gang.stopping:
            return
        self.kept.save(gang, self.agenda.now, self.given.snapshot.every, self.given.checkpoint.every)
        step = gang.completed(self.agenda.now)
        self.high = max(self.high, step)
        if step > gang.told:
            train = self.given.spec.train
            steps = gang.reported(step, train.global_batch, self.given.spec.model.seq_len)
            self._decide(events.StepsCompleted(UID, gang.order.attempt, steps, self.now))
            if self.kept.checkpoint > (self.job.checkpoint_step or 0):
                manifest, attempt = _manifest(self.kept.checkpoint), gang.order.attempt
                self._decide(events.CheckpointPublished(UID, attempt, self.kept.checkpoint, manifest, self.now))

    # What is asked of the core, and what it orders

    def _submit(self) -> None:
        self._tell(events.JobSubmitted(UID, 0, self.given.spec, self.now))

    def _tell(self, event: events.Event) -> None:
        self._count()
        self._catch_up()
        self._decide(event)
        waits = self.job.not_before if UID in self.state.jobs and self.job.placement is None else 0.0
        if waits > max(self.now, self.awaited):
            self.awaited = waits
            self.agenda.at(clock.us(waits) + 1, self._backed_off)

    def _backed_off(self) -> None:
        if self.job.placement is None:
            self._tick()

    def _tick(self) -> None:
        self._tell(events.Ticked(self.now))

    def _decide(self, event: events.Event) -> None:
        decision = self.decide(self.state, event, self.limits)
        self.state = decision.state
        self.records += decision.records
        for command in decision.commands:
            match command:
                case StartGang():
                    self._start(command)
                case PauseGang():
                    self._pause(command)
                case InspectGang(attempt=attempt, message=message):
                    found = events.Fault("hang", message, step=self.job.step)
                    self.agenda.after(0, partial(self._decide, events.GangFaulted(UID, attempt, (found,), self.now)))
                case StopGang():
                    self._stop()

    def _start(self, order: StartGang) -> None:
        pace = self.given.pace
        if order.restored is not None and order.attempt == order.restored.until + 1:
            self.kept.pass_over(order.restored.step, self.given.checkpoint.every)
        gang = self.gang = Gang(order, self.state.fleet, Fraction(pace.step_us, pace.of(order.layout)))
        if not self.machines.is_up(gang.ranks):
            gang.broken_at = self.agenda.now  # it is placed on a node of whose end the controller has not heard
        self.agenda.after(clock.us(self.given.phases.start_s), partial(self._started, gang))

    def _started(self, gang: Gang) -> None:
        if not self._works(gang):
            return
        self._tell(events.GangStarted(UID, gang.order.attempt, self.now))
        _, memory = self.kept.newest()
        load_s = self.given.phases.load_s(gang.layout.world, memory)
        self.agenda.after(clock.us(load_s), partial(self._resumed, gang))

    def _resumed(self, gang: Gang) -> None:
        if not self._works(gang):
            return
        self._count()
        step, memory = self.kept.newest()
        self.from_memory += memory
        manifest = "memory" if memory else _manifest(step) if step else None
        stalls = (self.given.snapshot, self.given.checkpoint)
        pace = self.given.pace.of(gang.layout)
        gang.stretch, gang.told = Stretch(step, self.agenda.now, self.high, pace, stalls), step
        self._tell(events.GangResumed(UID, gang.order.attempt, step, manifest, self.now))
        last = self.given.spec.train.steps
        for known in sorted({min(step + 1, last), min(self.high + 1, last)}):
            self.agenda.at(gang.stretch.completes(known), partial(self._stepped, gang))
        self.agenda.at(gang.stretch.begins(last + 1), partial(self._finished, gang))

    def _stepped(self, gang: Gang) -> None:
        if self._works(gang):
            self._count()
            self._catch_up()

    def _finished(self, gang: Gang) -> None:
        if self._works(gang):
            self._tell(events.GangFinished(UID, gang.order.attempt, self.now))

    def _works(self, gang: Gang) -> bool:
        return self.gang is gang and not gang.stopping and gang.broken_at is None

    def _pause(self, order: PauseGang) -> None:
        """The step under way is completed, and its state kept."""
        gang = self.gang
        assert gang is not None
        assert gang.stretch is not None
        assert self.job.pause is not None
        last = gang.completed(self.agenda.now) + 1
        self.agenda.at(clock.us(self.job.pause.until) + 1, partial(self._overdue, gang))
        self.agenda.at(gang.stretch.completes(last) + self.given.snapshot.us, partial(self._paused, gang, last))

    def _paused(self, gang: Gang, step: int) -> None:
        if self._works(gang):
            self._catch_up()
            self.kept.hold(gang, step)
            self._tell(events.GangPaused(UID, gang.order.attempt, step, self.now))

    def _stop(self) -> None:
        gang = self.gang
        assert gang is not None
        gang.stopping = True
        self.agenda.after(clock.us(self.given.phases.stop_s), partial(self._stopped, gang))

    def _stopped(self, gang: Gang) -> None:
        self._count()
        self.gang = None
        self._tell(events.GangStopped(UID, gang.order.attempt, self.now))

    # Where the time went

    def _count(self) -> None:
        now, gang = self.agenda.now, self.gang
        if now == self.counted:
            return
        use, attempt, ranks = Use.WAITING, 0, 0
        if gang is not None:
            use, attempt, ranks = gang.use, gang.order.attempt, gang.layout.world
        span = Span(self.counted, now, use, attempt, self.machines.alive, ranks)
        if gang is not None and gang.steps:
            assert gang.stretch is not None
            parts = gang.stretch.parts(now)
            self.ledger.worked(span, parts - gang.counted, gang.speed)
            gang.counted = parts
        else:
            self.ledger.idle(span)
        self.counted = now


def _manifest(step: int) -> str:
    return f"manifests/{step:010}-000001.json"
