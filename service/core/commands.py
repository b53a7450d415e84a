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
    """End every process of the attempt and free its slots. Safe to repeat. Answer: GangStopped."""

    uid: str
    attempt: int
    reason: str


Command = StartGang | StopGang


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
