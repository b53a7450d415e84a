"""Turns what the agents of one attempt say into events of the core. No Ray, no clock: time comes in.

Faults are held back for a moment, so that the rank that died can be told from the peers that lost their connection
to it; for longer where all the evidence is such echoes, or an agent that is gone: a node's death is known last.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Any

from service.contracts.events import (
    CheckpointRejected,
    Evaluated,
    Event,
    Fault,
    FaultKind,
    GangFaulted,
    GangFinished,
    GangPaused,
    GangResumed,
    HealthFound,
    LossSpiked,
    SaveDelayed,
    SaveFailed,
    SnapshotFailed,
    SnapshotHeld,
    SnapshotRefused,
    StandbysWarm,
    Step,
    StepsCompleted,
    StepSkipped,
    StepsRecalled,
    StragglerFound,
)
from service.core import stragglers
from service.runtime.node_agent import RankDied, Warm
from service.runtime.times import Times
from workers import reports

ORDERED = (reports.StepSkipped, reports.LossSpiked, reports.Evaluated, reports.Recalled, reports.Resumed)
"""Come after the steps that were told before them."""
ECHO_S = 0.3
COMPARE_S = 1.0
DEATHS = ("process_died", "out_of_memory")
ROOT_S = 6.0  # a dead node leaves Ray's table within about 3 s on a local fleet; then the core has the root


@dataclasses.dataclass(frozen=True, slots=True)
class AgentGone:
    """The agent of a node does not answer any more: it has died, or its node has."""

    job: str
    attempt: int
    node: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Complete:
    """All ranks have saved their part of the checkpoint at `step`."""

    step: int
    records: tuple[reports.ShardSaved, ...]


class Ear:
    """Listens to one attempt of `world` ranks."""

    def __init__(self, uid: str, attempt: int, world: int, nodes: dict[int, str]) -> None:
        self.uid, self.attempt, self.world, self.nodes = uid, attempt, world, nodes
        self.finished: set[int] = set()
        self.paused: dict[int, int] = {}  # rank -> the step after which it ended
        self.faults: list[Fault] = []
        self.fault_at: float | None = None
        self.over = False  # the attempt's end or its faults have been told
        self.shards: dict[int, dict[int, reports.ShardSaved]] = {}  # step -> rank -> record, of steps above `saved`
        self.saved = 0  # newest step of which every rank has saved its part
        self.unsaved: set[tuple[type, int]] = set()  # what was told of steps of which some rank did not save its part
        self.snapshots: dict[int, reports.SnapshotTaken] = {}  # of each rank the newest
        self.snapshot_step: int | None = None
        self.forgetful = False  # no snapshot since it was told that one failed
        self.complete: list[Complete] = []
        self.beats: dict[int, deque[float]] = {}  # rank -> what a small piece of work took, lately
        self.compared_at = 0.0
        self.stragglers: set[str] = set()  # nodes that were told of
        self.warm: dict[str, int] = {}  # node -> slots where somebody stands by, warm
        self.at_step: dict[int, int] = {}
        self.times = Times(world)

    def hear(self, said: Iterable[Any], at: float) -> list[Event]:
        """Events that follow at once. Checkpoints that are complete are left in `complete`."""
        events: list[Event] = []
        steps: list[Step] = []
        for what in said:
            if isinstance(what, ORDERED):
                self._completed(events, steps, at)  # it comes after them, and may go back
            match what:
                case reports.StepDone():
                    steps.append(Step(**dataclasses.asdict(what)))
                case reports.StepSkipped(step=step, action=action, reason=reason, samples=samples):
                    events.append(StepSkipped(self.uid, self.attempt, step, action, reason, samples, at))
                case reports.LossSpiked():
                    events.append(LossSpiked(self.uid, self.attempt, **{**dataclasses.asdict(what), "at": at}))
                case reports.Evaluated():
                    events.append(Evaluated(self.uid, self.attempt, **{**dataclasses.asdict(what), "at": at}))
                case reports.Moved(rank=rank, step=step, pulse_s=pulse_s):
                    self.at_step[rank] = max(step, 0)
                    self.times.add(what)
                    if pulse_s is not None:
                        self.beats.setdefault(rank, deque(maxlen=stragglers.BEATS)).append(pulse_s)
                case reports.Recalled(steps=recent):
                    known = tuple((attempt, Step(**dataclasses.asdict(done))) for attempt, done in recent)
                    events.append(StepsRecalled(self.uid, self.attempt, known, at))
                case reports.Resumed(step=step, manifest=manifest, weights=weights):
                    events.append(GangResumed(self.uid, self.attempt, step, manifest, at, weights))
                case reports.CheckpointRefused(manifest=manifest, reason=reason):
                    events.append(CheckpointRejected(self.uid, self.attempt, manifest, reason, at))
                case reports.ShardSaved():
                    self._shard(what)
                case reports.SaveFailed() | reports.SaveDelayed() if (type(what), what.step) not in self.unsaved:
                    self.unsaved.add((type(what), what.step))  # told once: where storage is away, every rank says it
                    kind = SaveFailed if isinstance(what, reports.SaveFailed) else SaveDelayed
                    reason = f"rank {what.rank}: {what.reason}"
                    events.append(kind(self.uid, self.attempt, what.step, reason, at))
                case reports.SnapshotTaken(rank=rank):
                    self.snapshots[rank] = what
                case reports.SnapshotFailed(step=step, rank=rank, reason=reason) if not self.forgetful:
                    self.forgetful = True
                    events.append(SnapshotFailed(self.uid, self.attempt, step, f"rank {rank}: {reason}", at))
                case reports.SnapshotRefused(step=step, reason=reason):
                    events.append(SnapshotRefused(self.uid, self.attempt, step, reason, at))
                case reports.Failed(rank=rank, message=message, step=step, traceback=traceback):
                    self._fault(Fault(what.kind, message, rank, self.nodes.get(rank), step, traceback), at)
                case RankDied(rank=rank):
                    cause, message = _death(what)
                    self._fault(Fault(cause, message, rank, self.nodes.get(rank), self.at_step.get(rank, 0)), at)
                case HealthFound():
                    events.append(what)
                case AgentGone(node=node, message=message):
                    step = max(self.at_step.values(), default=0)
                    self._fault(Fault("process_died", message, node=node, step=step), at)
                case Warm(node=node, slots=slots):
                    self.warm[node] = slots
                    events.append(StandbysWarm(self.uid, self.attempt, sum(self.warm.values()), at))
                case reports.Finished(rank=rank):
                    self.finished.add(rank)
                case reports.Paused(rank=rank, step=step):
                    self.paused[rank] = step
        self._completed(events, steps, at)
        events += self._snapshot(at)
        events += self._slow(at)
        return events

    def due(self, at: float, publishing: bool = False) -> list[Event]:
        """The faults, once their echoes have had time to arrive; the end, once its last checkpoint is published."""
        if self.over:
            return []
        if self.fault_at is not None and at - self.fault_at >= self._patience_s():
            self.over = True
            return [GangFaulted(self.uid, self.attempt, tuple(self.faults), at)]
        if len(self.finished) + len(self.paused) == self.world and not self.complete and not publishing:
            self.over = True
            if self.paused:
                return [GangPaused(self.uid, self.attempt, min(self.paused.values()), at)]
            return [GangFinished(self.uid, self.attempt, at)]
        return []

    @property
    def wonders(self) -> bool:
        """Whether something broke and its root is still looked for."""
        return self.fault_at is not None and not self.over

    def _patience_s(self) -> float:
        """How long a better root may still come: not at all for a process that ended while its agent lives, but long
        where all there is are broken connections, or an agent that fell silent."""
        if any(fault.kind in DEATHS and fault.rank is not None for fault in self.faults):
            return 0.0
        return ECHO_S if any(fault.kind != "peer" and fault.rank is not None for fault in self.faults) else ROOT_S

    def take_complete(self) -> list[Complete]:
        taken, self.complete = self.complete, []
        return taken

    def _completed(self, events: list[Event], steps: list[Step], at: float) -> None:
        if steps:
            in_order = tuple(sorted(steps, key=lambda one: one.step))
            events.append(StepsCompleted(self.uid, self.attempt, in_order, at))
            steps.clear()

    def _snapshot(self, at: float) -> list[Event]:
        """The newest step whose snapshot every rank has taken, once it is another one."""
        parts = self.snapshots.values()
        step = min((part.step for part in parts), default=None)  # a rank that is ahead has taken this one too
        if step is None or len(parts) < self.world or step == self.snapshot_step:
            return []
        self.snapshot_step, self.forgetful = step, False
        return [SnapshotHeld(self.uid, self.attempt, step, sum(part.nbytes for part in parts), at)]

    def _slow(self, at: float) -> list[Event]:
        if at - self.compared_at < COMPARE_S:
            return []
        self.compared_at = at
        found = [one for one in stragglers.find(self.beats, self.nodes) if one.node not in self.stragglers]
        self.stragglers |= {one.node for one in found}
        return [StragglerFound(self.uid, self.attempt, one.node, one.rank, one.ranks, one.factor, at) for one in found]

    def _fault(self, fault: Fault, at: float) -> None:
        self.faults.append(fault)
        if self.fault_at is None:
            self.fault_at = at

    def _shard(self, record: reports.ShardSaved) -> None:
        """A rank saves in order: when all have saved a step, a part that an older one lacks has failed for good."""
        if record.step <= self.saved:
            return
        known = self.shards.setdefault(record.step, {})
        if any(_folder(record) != _folder(other) for other in known.values()):
            known.clear()  # a rollback went back behind this step, which is done again
        known.setdefault(record.rank, record)
        if len(known) == self.world:
            self.complete.append(Complete(record.step, tuple(known[rank] for rank in range(self.world))))
            self.saved = record.step
            self.shards = {step: parts for step, parts in self.shards.items() if step > record.step}


def _death(died: RankDied) -> tuple[FaultKind, str]:
    if not died.out_of_memory:
        return "process_died", f"process of rank {died.rank} is gone"
    size = "" if died.used is None else f" when it had {died.used / 2**30:.2f} GiB"
    return "out_of_memory", f"the kernel ended rank {died.rank} for want of memory{size}"


def _folder(record: reports.ShardSaved) -> str:
    return record.index.rpartition("/")[0]
