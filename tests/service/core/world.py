"""A small world for the core: specs, fleets, jobs in any phase by events alone, and what must always hold."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from service.contracts import events
from service.contracts.cluster import Fleet, Node
from service.contracts.job import JobSpec, Phase
from service.core import liveness, machine
from service.core.commands import (
    Command,
    Decision,
    InspectGang,
    PauseGang,
    RaiseStandbys,
    Record,
    ReleaseGang,
    SaveGang,
    StartGang,
    StopGang,
)
from service.core.state import Job, State
from workers.spec import ParallelLayout

STEP_S = 0.5


@functools.cache
def spec(
    slots: int = 2,
    steps: int = 10,
    name: str = "job",
    budgets: tuple[tuple[str, int], ...] = (),
    elastic: bool = False,
    spares: int = 0,
    priority: int = 0,
) -> JobSpec:
    """`elastic`: from one slot to twice as many as it asks for."""
    bounds = {"min_slots": 1, "max_slots": 2 * slots} if elastic else None
    resources = {"device": "cpu", "slots": slots, "elastic": bounds, "spares": spares}
    return job_spec(name=name, steps=steps, budgets=dict(budgets), resources=resources, priority=priority)


def job_spec(slots: int = 2, steps: int = 10, device: str = "cpu", **fields: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": {"layers": 8, "hidden": 64, "heads": 8, "seq_len": 16},
            "data": {},
            "train": {"steps": steps, "global_batch": 16},
            "resources": {"device": device, "slots": slots},
            **fields,
        }
    )


def fleet(*racks: int, slots: int = 2, device: str = "cpu") -> Fleet:
    """Nodes n0, n1, ... with `slots` each: `racks[i]` of them in rack r{i}."""
    names = [f"r{rack}" for rack, count in enumerate(racks) for _ in range(count)]
    return Fleet(tuple(Node(f"id{i}", f"n{i}", slots, rack=rack, device=device) for i, rack in enumerate(names)))


def without(whole: Fleet, *names: str) -> Fleet:
    return Fleet(tuple(node for node in whole.nodes if node.name not in names))


def step(number: int, at: float = 0.0, step_s: float = STEP_S, loss: float = 1.0) -> events.Step:
    return events.Step(number, at, loss, 0.1, 1e-3, tokens=256, samples=16 * number, step_s=step_s)


class World:
    """State under `decide`, its clock, and the invariants checked after each event."""

    def __init__(self, nodes: Fleet | None = None, limits: liveness.Limits = liveness.DEFAULT) -> None:
        self.state, self.now, self.limits = State(), 1000.0, limits
        self.commands: list[Command] = []
        self.records: list[Record] = []
        self.held: dict[str, int] = {}  # attempt of each job whose slots are not free
        self.keeps: set[str] = set()  # jobs of which something is kept, by what was ordered and answered
        self.ordered: set[tuple[str, int, type]] = set()
        if nodes is not None:
            self.observe(nodes)

    def tell(self, event: events.Event) -> Decision:
        before = self.state
        decision = machine.decide(before, event, self.limits)
        self.state = decision.state
        self._check(before, event, decision)
        self.commands += decision.commands
        self.records += decision.records
        return decision

    def job(self, uid: str = "a") -> Job:
        return self.state.jobs[uid]

    def submit(
        self, uid: str = "a", job: JobSpec | None = None, seq: int | None = None, project: str = "default"
    ) -> Decision:
        number = len(self.state.jobs) if seq is None else seq
        return self.tell(events.JobSubmitted(uid, number, job or spec(), self.now, project))

    def observe(self, nodes: Fleet) -> Decision:
        return self.tell(events.FleetObserved(nodes, self.now))

    def tick(self, seconds: float = 0.0) -> Decision:
        self.now += seconds
        return self.tell(events.Ticked(self.now))

    def gang(self, kind: type, uid: str = "a", attempt: int | None = None, **fields: Any) -> Decision:
        """An event of the job's newest attempt, or of `attempt`."""
        return self.tell(kind(uid, self.job(uid).attempt if attempt is None else attempt, at=self.now, **fields))

    def steps(self, first: int, last: int, uid: str = "a") -> Decision:
        done = tuple(step(n, self.now + STEP_S * (n - first + 1)) for n in range(first, last + 1))
        self.now = done[-1].at
        return self.gang(events.StepsCompleted, uid, steps=done)

    def fault(self, kind: Any = "process_died", message: str = "killed by signal 9", uid: str = "a") -> Decision:
        return self.gang(events.GangFaulted, uid, faults=(events.Fault(kind, message, rank=1),))

    def start(self, uid: str = "a", resumed: int = 0, manifest: str | None = None) -> Decision:
        self.gang(events.GangStarted, uid)
        return self.gang(events.GangResumed, uid, step=resumed, manifest=manifest)

    def cancel(self, uid: str = "a", graceful: bool = False) -> Decision:
        return self.tell(events.CancelRequested(uid, self.now, graceful))

    def suspend(self, uid: str = "a") -> Decision:
        return self.tell(events.SuspendRequested(uid, self.now))

    def resume(self, uid: str = "a") -> Decision:
        return self.tell(events.ResumeRequested(uid, self.now))

    def share(self, queues: dict[str, int] | None = None, quotas: dict[str, int] | None = None) -> Decision:
        return self.tell(events.SharesObserved(queues or {}, quotas or {}, self.now))

    def restore(self, step: int, uid: str = "a", newer: tuple[str, ...] = ()) -> Decision:
        """Back to the checkpoint m{step} of attempt 1."""
        return self.tell(events.RestoreRequested(uid, step, 1, f"m{step}", newer, self.now))

    def rescale(self, slots: int, uid: str = "a", layout: ParallelLayout | None = None) -> Decision:
        return self.tell(events.RescaleRequested(uid, slots, layout, self.now))

    def paused(self, uid: str = "a") -> Decision:
        return self.gang(events.GangPaused, uid, step=self.job(uid).step)

    def stopped(self, uid: str = "a") -> Decision:
        return self.gang(events.GangStopped, uid)

    def bring(self, phase: Phase, uid: str = "a", job: JobSpec | None = None) -> Job:
        """Submit a job and bring it into `phase`. Terminal and stopping phases come by the shortest way."""
        self.submit(uid, job)
        if phase is Phase.QUEUED:
            self.gang(events.GangRefused, uid, reason="taken by another")
        if phase not in (Phase.QUEUED, Phase.PLACING):
            self.start(uid)
        if phase not in (Phase.QUEUED, Phase.PLACING, Phase.STARTING):
            self.steps(1, 4, uid)
        if phase is Phase.RECOVERING:
            self.fault(uid=uid)
        if phase is Phase.RESCALING:
            self.rescale(self.job(uid).spec.resources.slots // 2, uid)
        if phase in (Phase.SUSPENDING, Phase.SUSPENDED):
            self.suspend(uid)
        if phase in (Phase.FINISHING, Phase.SUCCEEDED):
            self.gang(events.GangFinished, uid)
        if phase in (Phase.CANCELLING, Phase.CANCELLED):
            self.cancel(uid)
        if phase is Phase.FAILED:
            for _ in range(4):
                self.fault("user", "ValueError: bad", uid)
                if self.job(uid).phase is Phase.RECOVERING:
                    self.stopped(uid)
                    self.tick(30)
                    self.start(uid, resumed=4)
        if phase is Phase.SUSPENDED:
            self.paused(uid)
        if phase in (Phase.SUCCEEDED, Phase.CANCELLED, Phase.FAILED, Phase.SUSPENDED):
            self.stopped(uid)
        assert self.job(uid).phase is phase
        return self.job(uid)

    def _check(self, before: State, event: events.Event, decision: Decision) -> None:
        if isinstance(event, events.GangStopped | events.GangRefused) and self.held.get(event.uid) == event.attempt:
            del self.held[event.uid]
            if isinstance(event, events.GangStopped) and self._kept(event.uid, event.attempt):
                self.keeps.add(event.uid)
        for command in decision.commands:
            self._order(command)
        after = decision.state.jobs
        slots = Counter((slot.node, slot.index) for job in after.values() for slot in job.held)
        assert all(count == 1 for count in slots.values()), "a slot is held twice"
        for uid, job in after.items():
            old = before.jobs.get(uid)
            assert job.attempt >= (old.attempt if old else 0), "attempts only grow"
            gang = job.placement is not None
            assert gang == (uid in self.held), "a placement is held exactly while a gang is ordered"
            assert (job.kept is not None) == (uid in self.keeps), "what is kept is what was ordered to be"
            assert not (gang and job.kept), "an attempt takes over what was kept"
            assert not (job.phase.terminal and job.holds_slots), "a terminal job holds nothing"
            assert job.stopping == ((uid, job.attempt, StopGang) in self.ordered and gang)
            pauses = job.phase in (Phase.RESCALING, Phase.SUSPENDING, Phase.CANCELLING)
            assert (job.pause is not None) == (pauses and gang and not job.stopping)
            assert not (job.phase in (Phase.QUEUED, Phase.SUSPENDED) and job.holds_slots), "who waits holds nothing"
            if gang and job.layout is not None:
                _check_layout(job)
            assert _reachable(old.phase if old else None, job.phase), f"{old and old.phase} -> {job.phase}"
            if old is None or old.phase is not job.phase:
                assert any(record.reason == job.reason and record.uid == uid for record in decision.records)
        if isinstance(event, events.Ticked):
            assert not any(_said(record, self.records) for record in decision.records), "a tick repeats itself"

    def _order(self, command: Command) -> None:
        if isinstance(command, ReleaseGang):
            self.keeps.remove(command.uid)
            return
        key = (command.uid, command.attempt)
        if isinstance(command, RaiseStandbys | InspectGang):
            assert self.held[command.uid] == command.attempt
            return
        if isinstance(command, SaveGang):
            assert self.held[command.uid] == command.attempt
            return
        kind = (type(command), command.durable) if isinstance(command, PauseGang) else type(command)
        assert (*key, kind) not in self.ordered, "ordered once"
        self.ordered.add((*key, kind))
        if isinstance(command, StartGang):
            self.keeps.discard(command.uid)
            assert command.uid not in self.held, "at most one live attempt"
            assert len(command.placement.slots) == command.layout.world
            self.held[command.uid] = command.attempt
        else:
            assert isinstance(command, StopGang | PauseGang)
            assert (*key, StartGang) in self.ordered, "nothing is stopped before it is started"
            assert self.held[command.uid] == command.attempt

    def _kept(self, uid: str, attempt: int) -> bool:
        stops = (one for one in self.commands if isinstance(one, StopGang))
        return next(one.keep for one in stops if (one.uid, one.attempt) == (uid, attempt))


def _check_layout(job: Job) -> None:
    """Ranks of a tp group stand on one node, and every sample of the batch is some rank's."""
    groups: dict[tuple[int, int], set[str]] = {}
    for rank, slot in enumerate(job.placement.slots):
        pp, dp, _ = job.layout.coordinates(rank)
        groups.setdefault((pp, dp), set()).add(slot.node)
    assert len(job.placement.slots) == job.layout.world
    assert all(len(nodes) == 1 for nodes in groups.values()), "a tp group is broken"
    batch = job.spec.train.global_batch
    assert sum(job.layout.micro_batches(batch)) * job.layout.micro_batch == batch, "the global batch has changed"


def _said(record: Record, records: list[Record]) -> bool:
    last = next((old for old in reversed(records) if old.uid == record.uid), None)
    return last is not None and (last.type, last.reason) == (record.type, record.reason)


def _reachable(old: Phase | None, new: Phase) -> bool:
    """By one edge, or by one and a scheduling pass."""
    edges = machine.edges()
    via = {target for source, target in edges if source == old} | {old}
    return new in via or any((middle, new) in edges for middle in via if new in (Phase.PLACING, Phase.RESCALING))
