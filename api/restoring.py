"""A job goes back to one of its checkpoints."""

from __future__ import annotations

import time
from typing import Any

from api import checkpoints, jobview
from api.door import Door
from api.views import CheckpointView
from service.contracts import errors
from service.contracts.job import Phase
from service.contracts.status import JobView


def begun(given: Door, uid: str, step: int | None, attempt: int | None, skip_samples: int = 0) -> JobView:
    """The wish is left for the controller. Conflict: the job is over, or ends."""
    row = given.store.job(uid)
    if (phase := Phase(row.phase)).terminal or phase in (Phase.FINISHING, Phase.CANCELLING):
        raise errors.Conflict(
            f"job {uid} can't go back any more: its phase is {phase}",
            hint=f"phalanx checkpoint fork {uid} begins a new job at one of its checkpoints",
        )
    view = checkpoints.usable(given, row, step, attempt)
    left_out = {"skip_samples": skip_samples} if skip_samples else {}
    given.store.request(uid, "restore", {**named(view), **left_out}, time.time())
    return jobview.of(given.store.job(uid), given.storage_root, time.time())


def named(view: CheckpointView) -> dict[str, Any]:
    """What an intent says of a checkpoint."""
    return {"step": view.step, "attempt": view.attempt, "manifest": view.manifest}
