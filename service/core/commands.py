"""What is to be done, in the imperative. The runtime does it and answers with an event."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from service.core.state import Placement, Restored, State
from workers.spec import ParallelLayout


@dataclasses.dataclass(frozen=True, slots=True)
class StartGang:
    """Take the slots, start the ranks, continue at the newest good checkpoint. Answer: GangStarted or GangRefused."""

    uid: str
    attempt: int
    layout: ParallelLayout
    placement: Placement
    rejected: tuple[str, ...]  # manifests not to try
    reason: str
    restored: Restored | None = None  # nor any that it bars, nor what is kept in memory of such steps


@dataclasses.dataclass(frozen=True, slots=True)
class StopGang:
    """End every rank of the attempt. Safe to repeat. Answer: GangStopped.

    `keep`: placement groups, agents and standbys stay for the job's next attempt; else all of its slots are free.
    """

    uid: str
    attempt: int
    reason: str
    keep: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ReleaseGang:
    """Free what a StopGang kept: the next attempt has to wait, or there is none. No answer: no rank of it is alive."""

    uid: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class PauseGang:
    """Ranks complete the step under way, keep its state in memory, and end. Answer: GangPaused, or a fault.

    `durable`: its state goes to storage; without it, only where memory can't have it.
    """

    uid: str
    attempt: int
    reason: str
    durable: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SaveGang:
    """Ranks write the state of the step under way to storage, and go on. Answer: CheckpointPublished, or SaveFailed."""

    uid: str
    attempt: int


@dataclasses.dataclass(frozen=True, slots=True)
class InspectGang:
    """Find out who a gang without progress waits for. Answer: GangFaulted, with a hang that names rank and stack."""

    uid: str
    attempt: int
    message: str  # first line of the fault's


@dataclasses.dataclass(frozen=True, slots=True)
class RaiseStandbys:
    """A warm process behind every rank, and on every spare slot; where there are some, what is missing. No answer.

    What stood by on slots that the placement no longer has is freed: another job gets them.
    """

    uid: str
    attempt: int
    layout: ParallelLayout
    placement: Placement


Command = StartGang | StopGang | ReleaseGang | PauseGang | SaveGang | InspectGang | RaiseStandbys


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One row of a job's event log: what was decided, and why in one sentence."""

    uid: str
    type: str  # CamelCase, published
    reason: str
    at: float
    data: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    state: State
    commands: tuple[Command, ...] = ()
    records: tuple[Record, ...] = ()
