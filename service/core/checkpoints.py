"""What is told of a checkpoint, whatever its job does meanwhile: also of a job that is over and forgotten."""

from __future__ import annotations

from typing import Any

from service.contracts import events
from service.core.commands import Record

REJECTED = "CheckpointRejected"
"""Its record names the `manifest` and `why`: the checkpoint's row is made from it."""


def record(fact: events.CheckpointFact) -> Record:
    data: dict[str, Any] = {}
    match fact:
        case events.CheckpointRejected(reason=why):
            return rejection(fact.uid, fact.manifest, why, fact.at)
        case events.CheckpointVerified(step=step):
            reason = f"checkpoint of step {step} was read through and verified: {fact.manifest}"
            data = {"step": step}
        case events.CheckpointCheckFailed(step=step, reason=why):
            reason = f"checkpoint of step {step} could not be read through, which says nothing of it: {why}"
            data = {"step": step}
        case events.CheckpointExported(step=step, to=to):
            reason = f"checkpoint of step {step} was exported to {to}"
            data = {"step": step, "to": to}
        case events.CheckpointExportFailed(step=step, to=to, reason=why):
            reason = f"checkpoint of step {step} could not be exported to {to}: {why}"
            data = {"step": step, "to": to}
    return Record(fact.uid, type(fact).__name__, reason, fact.at, {"manifest": fact.manifest, **data})


def rejection(uid: str, manifest: str, why: str, at: float) -> Record:
    reason = f"checkpoint {manifest} is never tried again: {why}"
    return Record(uid, REJECTED, reason, at, {"manifest": manifest, "why": why})
