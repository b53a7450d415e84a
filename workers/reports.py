"""What a rank says: plain values, no torch. A rank hands each to one callable; who listens is not its business."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

RankPhase = Literal["start", "load", "step", "save", "end"]
FaultKind = Literal["code", "user", "peer", "numeric", "drift", "corruption", "storage", "out_of_memory"]


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """The rank entered a phase, or completed `step` of it (-1: none yet)."""

    rank: int
    phase: RankPhase
    step: int
    at: float  # Unix seconds
    pulse_s: float | None = None  # what a small piece of work took before this step (workers.pulse), now and then
    parts: dict[str, float] | None = None  # of a completed step: seconds of it on this rank, by what it did


@dataclasses.dataclass(frozen=True, slots=True)
class StepDone:
    """Rank 0 completed a step. Counts are global, not the rank's."""

    step: int  # from 1
    at: float  # Unix seconds
    loss: float  # mean over the step's tokens, nats
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int  # of this step
    samples: int  # consumed since the start of the run, this step included
    step_s: float
    tokens_per_s: float | None = None  # of the world
    mfu: float | None = None  # of the world, PaLM's convention (workers.flops); None where the device's peak is unknown
    parts: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds of step_s: data, forward_backward, ...
    bubble: float = 0.0  # share of a step that the pipeline schedule waits, in theory (workers.bubble)
    memory: int | None = None  # peak bytes of rank 0: of its GPU, or of its process
    traffic: dict[str, dict[str, int]] | None = None  # rank 0's collectives and bytes by axis, of a counted step


@dataclasses.dataclass(frozen=True, slots=True)
class StepSkipped:
    """Rank 0: loss or gradient was no number on some rank; no rank changed its parameters."""

    step: int  # that would have been completed
    at: float  # Unix seconds
    action: Literal["skip", "rollback", "rescale"]  # rescale: fp16's loss scale was too high
    reason: str  # rank, stage, micro-batch and samples
    samples: tuple[int, ...] = ()  # of the micro-batch where it began


@dataclasses.dataclass(frozen=True, slots=True)
class LossSpiked:
    """Rank 0: the loss of a step is far above the recent ones. Told once, until it is among them again."""

    step: int
    at: float  # Unix seconds
    loss: float
    usual: float  # median of the recent ones
    bound: float  # up to which it would have been usual
    samples: tuple[int, int]  # of the step: the first, and the one after the last


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluated:
    """Rank 0: the mean loss on other text than is trained on, after `step`."""

    step: int
    at: float  # Unix seconds
    loss: float  # over all tokens
    tokens: int
    sources: tuple[tuple[str, float, int], ...] = ()  # (name, loss, tokens) of each
    best: tuple[int, float] | None = None  # step and metric of the best one so far
    worse: int = 0  # evaluations since, this one included


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed:
    """Rank 0: the run continues after `step` (0: from the seed)."""

    step: int
    manifest: str | None
    weights: str | None = None  # what was loaded from elsewhere, and what was not


@dataclasses.dataclass(frozen=True, slots=True)
class Recalled:
    """Rank 0: the last steps before the snapshot at which the run continues. Who broke may not have told them."""

    steps: tuple[tuple[int, StepDone], ...]  # (the attempt that completed it, what it said)


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointRefused:
    """A checkpoint failed its verification and was passed over by all ranks."""

    manifest: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class ShardSaved:
    """This rank's part of a checkpoint is in storage, checksummed."""

    step: int
    rank: int
    index: str  # path of the shard's index, relative to the job's storage root
    index_digest: str  # xxh3-128, hex
    nbytes: int
    header: dict[str, Any]  # layout-independent state: cursor, ledger, optimizer, seed; equal on all ranks
    stall_s: float  # seconds that the step's thread was blocked


@dataclasses.dataclass(frozen=True, slots=True)
class SaveDelayed:
    """This rank's part could not be written so far, and is tried again."""

    step: int
    rank: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class SaveFailed:
    """This rank's part could not be written. Training goes on."""

    step: int
    rank: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """This rank's part of a snapshot is in the memory of its node, and of a peer where there is one."""

    step: int
    rank: int
    nbytes: int
    stall_s: float  # seconds that the step's thread was blocked


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """This rank's part could not be kept in memory. Training goes on; durable checkpoints are not concerned."""

    step: int
    rank: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotRefused:
    """Rank 0: a snapshot could not be read or failed its verification, and was passed over by all ranks."""

    step: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """The rank's training ended by an error."""

    rank: int
    kind: FaultKind
    step: int
    message: str
    traceback: str


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The rank completed all steps and its last save."""

    rank: int
    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class Paused:
    """The rank ended after `step` as it was asked to; its state is in memory, or where that is full in storage."""

    rank: int
    step: int


Progress = Moved | StepDone | StepSkipped | LossSpiked | Evaluated | Recalled | Resumed | Finished | Paused
Saved = ShardSaved | SaveDelayed | SaveFailed | SnapshotTaken | SnapshotFailed
Report = Progress | CheckpointRefused | SnapshotRefused | Saved | Failed
