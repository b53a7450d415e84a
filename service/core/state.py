"""What the core remembers: jobs, the fleet they stand on, what is held against nodes.

Frozen; changed by `dataclasses.replace`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Literal

from service.contracts.cluster import Fleet, NodeHealth
from service.contracts.events import Fault
from service.contracts.job import Cause, JobSpec, Phase
from workers.spec import ParallelLayout


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One device of one node."""

    node: str  # Ray's node id
    name: str  # the node's name
    index: int  # of the device on its node


Taken = Set[tuple[str, int]]  # (node id, device index) of slots that can't be had


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Slot of each rank: `slots[rank]`; and those of spare nodes, which are held as well."""

    slots: tuple[Slot, ...]
    spares: tuple[Slot, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Ids of the nodes stood on, in rank order."""
        return tuple(dict.fromkeys(slot.node for slot in self.slots))

    @property
    def held(self) -> tuple[Slot, ...]:
        return self.slots + self.spares


MoveKind = Literal["rescale", "drain", "preempted", "yielded", "restart"]
Tier = Literal["memory", "storage", "seed"]


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    """Why a gang at work is to end after a step, and until when it has time for that."""

    kind: MoveKind | Literal["suspended"]
    reason: str
    until: float
    node: str | None = None  # that is to be left
    durable: bool = False  # its state goes to storage


@dataclasses.dataclass(frozen=True, slots=True)
class Spent:
    """Seconds without a step, by what they were for; `first_step_s` ends where the first step begins."""

    stop_s: float = 0.0
    place_s: float = 0.0
    start_s: float = 0.0
    load_s: float = 0.0
    first_step_s: float = 0.0
    suspended_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.stop_s + self.place_s + self.start_s + self.load_s + self.first_step_s + self.suspended_s


@dataclasses.dataclass(frozen=True, slots=True)
class Incident:
    """One fault, or one planned move, and what was done. Seconds as DESIGN defines them; None while it is not over."""

    number: int  # from 1, in the job
    attempt: int  # that broke
    cause: Cause | None  # None: nobody's
    kind: str
    message: str
    rank: int | None
    node: str | None
    step: int  # last completed when it broke
    faulted_at: float
    detect_s: float  # from the last progress to knowing
    action: str  # the reason sentence of what was done
    faults: tuple[Fault, ...] = ()
    steps_redone: int | None = None
    recover_s: float | None = None  # from the fault to the first new completed step
    before: ParallelLayout | None = None  # the layout that broke
    after: ParallelLayout | None = None  # the one that went on
    tier: Tier | None = None  # where the state came from
    spent: Spent = Spent()


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """The job went back to the checkpoint of this step and attempt, when `until` was its newest attempt."""

    step: int
    attempt: int
    until: int
    skip: int = 0  # samples that are left out after it

    def bars(self, step: int, attempt: int) -> bool:
        """Whether a checkpoint is of what was undone: never resumed at, also when it is published later."""
        return attempt <= self.until and (step, attempt) > (self.step, self.attempt)


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
    type: str
    status: bool
    reason: str  # one word
    message: str
    at: float  # since when the status is so


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One job: what was asked, where it is, what it has done and what it holds."""

    uid: str
    seq: int
    spec: JobSpec
    submitted_at: float
    phase: Phase = Phase.QUEUED
    reason: str = ""
    phase_since: float = 0.0
    project: str = "default"
    generation: int = 1  # of the spec

    attempt: int = 0  # the newest; numbers only grow
    layout: ParallelLayout | None = None
    placement: Placement | None = None  # held until GangStopped or GangRefused says it is free
    stopping: bool = False  # StopGang was ordered for the held placement
    keeping: bool = False  # and what stands there is to be kept for the next attempt
    kept: Placement | None = None  # whose groups, agents and standbys wait for the next attempt
    pause: Pause | None = None  # PauseGang was ordered
    standbys: int = 0  # slots on which somebody stands by, warm
    watched_at: float = 0.0  # since when somebody listens to the gang: what it did before is told late
    inspected_at: float = 0.0  # when it was last looked who a gang without progress waits for
    unraised: bool = False  # the attempt makes steps and has no standbys yet
    stale: bool = False  # the attempt was told what its spec does not say any more
    wanted_slots: int | None = None  # by the newest request; None: as the spec has it
    wanted_layout: ParallelLayout | None = None
    rescale: str | None = None  # a request that is not met yet: what was last said of it
    suspend: bool = False  # it is to hold nothing, by request
    position: int | None = None  # in the queue, from 1, while it waits
    backfilled: bool = False  # it was placed while another waited that comes before it
    ending: Phase | None = None  # terminal phase to enter once the slots are free
    not_before: float = 0.0  # back-off: no new attempt earlier
    refusals: int = 0  # in a row, since a gang last started
    quarantined: bool = False  # a checkpoint was passed over because it led to the same fault again and again

    step: int = 0  # last completed by the current attempt
    high_step: int = 0  # highest ever completed
    samples: int = 0
    tokens: int = 0  # of steps counted once
    loss: float | None = None
    loss_first: float | None = None
    eval_loss: float | None = None  # as last told
    eval_step: int | None = None
    eval_best: tuple[int, float] | None = None  # step and metric of the best one
    eval_worse: int = 0  # evaluations since
    productive_s: float = 0.0  # own time of each step, counted once
    redone_s: float = 0.0  # own time of steps that were completed before
    spent: Spent = Spent()  # what no incident has
    stage_at: float = 0.0  # up to when the seconds without a step are counted
    slot_s: float = 0.0  # seconds times slots that it held
    slots_at: float = 0.0  # up to when those are counted
    tokens_per_s: float | None = None  # of the newest step
    step_s: float | None = None  # own time of recent steps, smoothed
    progress_at: float = 0.0  # last sign of progress of the current attempt
    resumed_step: int | None = None  # where the current attempt continued
    resumed_manifest: str | None = None  # at which checkpoint; None: from memory or the seed
    started_at: float | None = None  # first step ever completed

    checkpoint_step: int | None = None  # newest published
    checkpoint: str | None = None  # its manifest
    snapshot_step: int | None = None  # newest whole one in memory
    snapshot_bytes: int = 0  # of one copy of it
    rejected: tuple[str, ...] = ()  # manifests that failed verification, or were undone
    restored: Restored | None = None  # by the newest request to go back
    incidents: tuple[Incident, ...] = ()
    charges: tuple[tuple[Cause, float], ...] = ()  # (cause, when), for the budgets
    ended_at: float | None = None
    conditions: tuple[Condition, ...] = ()

    @property
    def holds_slots(self) -> bool:
        return self.placement is not None or self.kept is not None

    @property
    def held(self) -> tuple[Slot, ...]:
        """Every slot that nobody else may have: of ranks, of spares, and what is kept."""
        slots = self.placement.held if self.placement else ()
        return slots + self.kept.held if self.kept else slots


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """All jobs that are not terminal (terminal ones may linger and hold nothing), and the fleet."""

    jobs: Mapping[str, Job] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    fleet: Fleet = dataclasses.field(default_factory=Fleet)
    health: Mapping[str, NodeHealth] = dataclasses.field(default_factory=lambda: MappingProxyType({}))  # by name
    since: Mapping[str, float] = dataclasses.field(default_factory=lambda: MappingProxyType({}))  # node id -> when
    queues: Mapping[str, int] = dataclasses.field(default_factory=lambda: MappingProxyType({}))  # name -> priority
    quotas: Mapping[str, int] = dataclasses.field(default_factory=lambda: MappingProxyType({}))  # project -> slots
