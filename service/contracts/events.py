"""What happened, in the past tense, with the time it happened at. The only input of the core besides its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from service.contracts.cluster import Fleet
from service.contracts.job import JobSpec
from workers.spec import ParallelLayout

FaultKind = Literal[
    "process_died", "out_of_memory", "node_lost", "gang_lost", "device", "preempted",
    "peer", "code", "user", "numeric", "drift", "corruption", "storage", "hang", "start_failed"
]  # fmt: skip
HealthAction = Literal["log", "restart", "reset", "drain", "reboot"]


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One piece of evidence that an attempt is broken."""

    kind: FaultKind
    message: str
    rank: int | None = None
    node: str | None = None  # name
    step: int = 0
    traceback: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One completed step as rank 0 measured it; counts are global."""

    step: int
    at: float
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int  # of this step
    samples: int  # consumed since the start of the run
    step_s: float
    tokens_per_s: float | None = None  # of the world
    mfu: float | None = None  # of the world, PaLM's convention; None where the device's peak is unknown
    parts: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds of step_s: data, forward_backward, ...
    bubble: float = 0.0  # share of a step that the pipeline schedule waits, in theory
    memory: int | None = None  # peak bytes of rank 0: of its GPU, or of its process
    traffic: dict[str, dict[str, int]] | None = None  # rank 0's collectives and bytes by axis, of a counted step


@dataclasses.dataclass(frozen=True, slots=True)
class JobSubmitted:
    uid: str
    seq: int  # order of submission
    spec: JobSpec
    at: float
    project: str = "default"


@dataclasses.dataclass(frozen=True, slots=True)
class CancelRequested:
    """`graceful`: a gang at work completes the step under way first, and has it in storage."""

    uid: str
    at: float
    graceful: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreRequested:
    """The job is to go back to this published checkpoint. `newer`: manifests of the newer ones that were known."""

    uid: str
    step: int
    attempt: int  # that published it
    manifest: str
    newer: tuple[str, ...]
    at: float
    skip: int = 0  # samples after it that are left out


@dataclasses.dataclass(frozen=True, slots=True)
class RescaleRequested:
    """The job is to run on so many slots from now on, in `layout` where one was named."""

    uid: str
    slots: int
    layout: ParallelLayout | None
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class SuspendRequested:
    """The job is to hold nothing until it is resumed."""

    uid: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class ResumeRequested:
    """A job that was suspended is to go on."""

    uid: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class SaveRequested:
    """The step under way is to become a checkpoint."""

    uid: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class RestartRequested:
    """The gang is to end and to be started again, with its state from memory."""

    uid: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class SpecChanged:
    """The job is to be what this spec says from now on: priority, elastic bounds, checkpoints or budgets changed."""

    uid: str
    spec: JobSpec
    generation: int
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class SharesObserved:
    """Which queues there are, with their priorities, and how many slots the jobs of a project may hold together."""

    queues: Mapping[str, int]
    quotas: Mapping[str, int]  # of projects that have one
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class HealthFound:
    """What the health of a node asks for: nothing but a note; new processes; a reset of the device once it is free; no
    more work on the node; its reboot."""

    node: str  # name
    action: HealthAction
    message: str
    at: float
    devices: tuple[int, ...] = ()  # local indices; none: the node as a whole


@dataclasses.dataclass(frozen=True, slots=True)
class NodeProbed:
    """A node that had to be probed before it is used again was."""

    node: str  # name
    passed: bool
    message: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class DevicesReset:
    """Devices that waited for their reset have had it."""

    node: str  # name
    devices: tuple[int, ...]
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class NodeForgiven:
    """An operator says that nothing is held against the node any more."""

    node: str  # name
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class FleetObserved:
    """The alive nodes as they are now. Gone nodes that a gang stands on break it.

    `announced`: ids of gone nodes that were draining when they were last seen; the core knows them by itself.
    """

    fleet: Fleet
    at: float
    announced: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Ticked:
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class GangStarted:
    """All ranks of the attempt have their processes and their assignment; they are loading."""

    uid: str
    attempt: int
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class GangRefused:
    """The attempt could not get what it was placed on. Nothing of it is held any more, nor what was kept for it."""

    uid: str
    attempt: int
    reason: str
    at: float
    node: str | None = None  # name of the one that refused, where one did


@dataclasses.dataclass(frozen=True, slots=True)
class GangResumed:
    """The ranks agreed on where to continue: after `step` (0: from the seed)."""

    uid: str
    attempt: int
    step: int
    manifest: str | None
    at: float
    weights: str | None = None  # what was loaded from elsewhere, and what was not


@dataclasses.dataclass(frozen=True, slots=True)
class StepsRecalled:
    """Of the snapshot at which the ranks continue: the last steps before it, heard of or not."""

    uid: str
    attempt: int
    steps: tuple[tuple[int, Step], ...]  # (the attempt that completed it, the step), in order
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class StepsCompleted:
    """One or more steps, in order, since the last such event."""

    uid: str
    attempt: int
    steps: tuple[Step, ...]
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class GangFaulted:
    """The attempt is broken. All evidence of one short moment, so that the root can be told from its echoes."""

    uid: str
    attempt: int
    faults: tuple[Fault, ...]
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class GangFinished:
    """Every rank completed its last step and its last checkpoint is published."""

    uid: str
    attempt: int
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class GangPaused:
    """Every rank has ended after `step`, whose state is in memory or in storage."""

    uid: str
    attempt: int
    step: int
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class GangStopped:
    """Ranks verified gone: the slots are free, or what was kept of them waits for the next attempt."""

    uid: str
    attempt: int
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointPublished:
    uid: str
    attempt: int
    step: int
    manifest: str
    at: float
    nbytes: int = 0  # of its shards


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointRejected:
    """A published checkpoint failed its verification and is never tried again. True whichever attempt runs now."""

    uid: str
    attempt: int  # that found it; by request: that published it
    manifest: str
    reason: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointVerified:
    """Every byte of it was read, and is as it was written."""

    uid: str
    attempt: int  # that published it
    step: int
    manifest: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointCheckFailed:
    """It could not be read through: that says nothing of the checkpoint."""

    uid: str
    step: int
    manifest: str
    reason: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointExported:
    """Its model is a Hugging Face folder at `to`."""

    uid: str
    step: int
    manifest: str
    to: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointExportFailed:
    uid: str
    step: int
    manifest: str
    to: str
    reason: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class SaveFailed:
    """A checkpoint could not be written; training goes on."""

    uid: str
    attempt: int
    step: int
    reason: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class SaveDelayed:
    """A checkpoint could not be written so far; it is tried again, and training goes on."""

    uid: str
    attempt: int
    step: int
    reason: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotHeld:
    """The state of `step` is in memory, all of it, in two places where there are two nodes."""

    uid: str
    attempt: int
    step: int
    nbytes: int  # of one copy
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """A snapshot could not be kept; told once, until one is held again."""

    uid: str
    attempt: int
    step: int
    reason: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotRefused:
    """A snapshot could not be read or failed its verification; the ranks passed it over."""

    uid: str
    attempt: int
    step: int
    reason: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class StepSkipped:
    """Loss or gradient was no number; no parameter changed, and the attempt goes on."""

    uid: str
    attempt: int
    step: int  # that would have been completed
    action: Literal["skip", "rollback", "rescale"]
    reason: str
    samples: tuple[int, ...]  # of the micro-batch where it began
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class LossSpiked:
    """The loss of a step is far above the recent ones."""

    uid: str
    attempt: int
    step: int
    loss: float
    usual: float  # median of the recent ones
    bound: float  # up to which it would have been usual
    samples: tuple[int, int]  # of the step: the first, and the one after the last
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class StragglerFound:
    """A node, or one device of it, is slower than the others at the same small piece of work. Told once an attempt."""

    uid: str
    attempt: int
    node: str  # name
    rank: int  # the slowest
    ranks: int  # of the node that are slow
    factor: float  # of its time over that of the other nodes
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class StandbysWarm:
    """So many slots of the job have a process standing by that is as warm as it gets."""

    uid: str
    attempt: int
    warm: int
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluated:
    """The mean loss on other text than is trained on, after `step`."""

    uid: str
    attempt: int
    step: int
    loss: float  # over all tokens
    tokens: int
    at: float
    sources: tuple[tuple[str, float, int], ...] = ()  # (name, loss, tokens) of each
    best: tuple[int, float] | None = None  # step and metric of the best one so far
    worse: int = 0  # evaluations since, this one included


GangEvent = (
    GangStarted
    | GangRefused
    | GangResumed
    | StepsRecalled
    | StepsCompleted
    | GangFaulted
    | GangFinished
    | GangPaused
    | GangStopped
    | CheckpointPublished
    | SaveFailed
    | SaveDelayed
    | SnapshotHeld
    | SnapshotFailed
    | SnapshotRefused
    | StepSkipped
    | LossSpiked
    | StragglerFound
    | StandbysWarm
    | Evaluated
)
CheckpointFact = (
    CheckpointRejected | CheckpointVerified | CheckpointCheckFailed | CheckpointExported | CheckpointExportFailed
)
"""Of no attempt: also told of a job that is over."""

Request = (
    CancelRequested
    | RestoreRequested
    | RescaleRequested
    | SuspendRequested
    | ResumeRequested
    | SaveRequested
    | RestartRequested
    | SpecChanged
)
"""What a user wants of a job."""

JobEvent = JobSubmitted | Request | GangEvent | CheckpointFact
NodeEvent = HealthFound | NodeProbed | DevicesReset | NodeForgiven
Event = JobEvent | FleetObserved | SharesObserved | NodeEvent | Ticked
