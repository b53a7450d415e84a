"""What a rule answers with: the job as it is now, what is to be done, and what is told. And how that is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from service.contracts.job import Phase
from service.core.commands import Command, Record, StopGang
from service.core.state import Job


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    job: Job
    commands: tuple[Command, ...] = ()
    records: tuple[Record, ...] = ()


def stop(job: Job, reason: str, keep: bool) -> tuple[tuple[Command, ...], dict[str, Any]]:
    """The order to end what is held, and the fields that say so. Ordered once: the first one's `keep` counts."""
    if job.placement is None or job.stopping:
        return (), {"pause": None}
    return (StopGang(job.uid, job.attempt, reason, keep),), {"stopping": True, "keeping": keep, "pause": None}


def record(job: Job, kind: str, reason: str, at: float, data: Mapping[str, Any] | None = None) -> Record:
    where = {"phase": job.phase.value, "attempt": job.attempt}
    return Record(job.uid, kind, reason, at, {**where, **(data or {})})


def move(
    job: Job,
    phase: Phase,
    kind: str,
    reason: str,
    at: float,
    commands: tuple[Command, ...] = (),
    data: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Outcome:
    """Into `phase`, with its reason on the job and in a record."""
    after = dataclasses.replace(job, phase=phase, reason=reason, phase_since=at, **changes)
    return Outcome(after, commands, (record(after, kind, reason, at, data),))
