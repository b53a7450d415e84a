"""Turns what the agents of one attempt say into events of the core. No Ray, no clock: time comes in.

Faults are held back for a moment, so that the rank that died can be told from the peers that lost their connection to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from service.contracts.events import (
    CheckpointRejected,
    Event,
    Fault,
    GangFaulted,
    GangResumed,
    SaveFailed,
    Step,
    StepsCompleted,
)
from service.runtime.logs import Chunk
from service.runtime.node_agent import RankDied
from workers import reports

ECHO_S = 0.3


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
        self.faults: list[Fault] = []
        self.fault_at: float | None = None
        self.told_faults = False
        self.shards: dict[int, dict[int, reports.ShardSaved]] = {}
        self.complete: list[Complete] = []
        self.chunks: list[Chunk] = []
        self.at_step: dict[int, int] = {}

    def hear(self, said: Iterable[Any], at: float) -> list[Event]:
        """Events that follow at once. Chunks of logs and complete checkpoints are left in `chunks` and `complete`."""
        events: list[Event] = []
        steps: list[Step] = []
        for what in said:
            match what:
                case reports.StepDone():
                    steps.append(Step(**dataclasses.asdict(what)))
                case reports.Moved(rank=rank, step=step):
                    self.at_step[rank] = max(step, 0)
                case reports.Resumed(step=step, manifest=manifest):
                    events.append(GangResumed(self.uid, self.attempt, step, manifest, at))
                case reports.CheckpointRefused(manifest=manifest, reason=reason):
                    events.append(CheckpointRejected(self.uid, self.attempt, manifest, reason, at))
                case reports.ShardSaved():
                    self._shard(what)
                case reports.SaveFailed(step=step, rank=rank, reason=reason):
                    events.append(SaveFailed(self.uid, self.attempt, step, f"rank {rank}: {reason}", at))
                case reports.Failed():
                    self._fault(Fault(what.kind if what.kind != "storage" else "user", what.message, what.rank, self.nodes.get(what.rank), what.step, what.traceback), at)
                case RankDied(rank=rank):
                    step = self.at_step.get(rank, 0)
                    self._fault(Fault("process_died", f"process of rank {rank} is gone", rank, self.nodes.get(rank), step), at)
                case reports.Finished(rank=rank):
                    self.finished.add(rank)
                case Chunk():
                    self.chunks.append(what)
        if steps:
            events.append(StepsCompleted(self.uid, self.attempt, tuple(steps), at))
        return events

    def due(self, at: float) -> list[Event]:
        """The faults, once their echoes have had time to arrive."""
        if self.fault_at is None or self.told_faults or at - self.fault_at < ECHO_S:
            return []
        self.told_faults = True
        return [GangFaulted(self.uid, self.attempt, tuple(self.faults), at)]

    def take_chunks(self) -> list[Chunk]:
        taken, self.chunks = self.chunks, []
        return taken

    def take_complete(self) -> list[Complete]:
        taken, self.complete = self.complete, []
        return taken

    @property
    def all_finished(self) -> bool:
        return len(self.finished) == self.world

    def _fault(self, fault: Fault, at: float) -> None:
        self.faults.append(fault)
        if self.fault_at is None:
            self.fault_at = at

    def _shard(self, record: reports.ShardSaved) -> None:
        known = self.shards.setdefault(record.step, {})
        if record.rank in known:
            return
        known[record.rank] = record
        if len(known) == self.world:
            self.complete.append(Complete(record.step, tuple(known[rank] for rank in range(self.world))))
