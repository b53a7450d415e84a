"""What a user wants of a job that is there: to end, to wait, to go on, to save, to begin anew, to be another one.

Each is left for the controller; 409 names the phase where it makes no sense.
"""

from __future__ import annotations

import time
from collections.abc import Container
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Response
from pydantic import Field

from api import amending, jobview, removal, restoring
from api.door import Given, Uid
from api.sent import Sent
from api.views import Problem
from service.contracts import errors
from service.contracts.job import Phase
from service.contracts.status import JobView
from service.store.records import JobRow

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

ANSWERS: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "there is no such job"},
    409: {"model": Problem, "description": "not in the phase that the job is in"},
}
MOST_SAMPLES = 2**53


class Restart(Sent):
    step: int | None = Field(
        default=None, ge=0, lt=2**53, description="of a checkpoint to go back to; null: none, or, to skip, the newest"
    )
    skip_samples: int = Field(default=0, ge=0, lt=MOST_SAMPLES, description="that are left out after that step")


OVER = (*(phase for phase in Phase if phase.terminal), Phase.FINISHING, Phase.CANCELLING)
AT_WORK = (Phase.RUNNING,)


@router.post("/{uid:word}:cancel", status_code=202, responses=ANSWERS)
def cancel(
    given: Given,
    uid: Uid,
    graceful: Annotated[bool, Query(description="after the step under way, which becomes a checkpoint")] = False,
) -> JobView:
    """End the job and free its slots, at once where nothing else is said. Repeating it changes nothing."""
    row = given.store.job(uid)
    if Phase(row.phase).terminal:
        raise errors.Conflict(f"job {uid} is over: its phase is {row.phase}", hint="there is nothing left to cancel")
    given.store.cancel(uid, time.time(), graceful)
    return _now(given, uid)


@router.post("/{uid:word}:suspend", status_code=202, responses=ANSWERS)
def suspend(given: Given, uid: Uid) -> JobView:
    """Have the job hold nothing until it is resumed. The step under way is completed and becomes a checkpoint."""
    _unless(given.store.job(uid), OVER, "suspended any more")
    given.store.desire(uid, "suspended", time.time())
    return _now(given, uid)


@router.post("/{uid:word}:resume", status_code=202, responses=ANSWERS)
def resume(given: Given, uid: Uid) -> JobView:
    """Have a job that was suspended go on: it waits for its slots like a new one."""
    row = given.store.job(uid)
    _unless(row, OVER, "resumed any more")
    if row.desired != "suspended" and row.phase not in (Phase.SUSPENDING, Phase.SUSPENDED):
        raise errors.Conflict(f"job {uid} was not suspended: its phase is {row.phase}")
    given.store.desire(uid, "running", time.time())
    return _now(given, uid)


@router.post("/{uid:word}:checkpoint", status_code=202, responses=ANSWERS)
def checkpoint(given: Given, uid: Uid) -> JobView:
    """Have the step under way written to storage; the job goes on. An event, `CheckpointPublished`, tells when."""
    _only(given.store.job(uid), "save")
    given.store.request(uid, "save", {}, time.time())
    return _now(given, uid)


@router.post("/{uid:word}:restart", status_code=202, responses=ANSWERS)
def restart(given: Given, uid: Uid, body: Annotated[Restart | None, Body()] = None) -> JobView:
    """Have its gang end after the step under way and start again, with its state from memory. With a `step`, go back to
    the checkpoint of it, and leave out `skip_samples` after it: those that a loss was spoiled by."""
    if body is not None and (body.step is not None or body.skip_samples):
        return restoring.begun(given, uid, body.step, None, body.skip_samples)
    _only(given.store.job(uid), "start again")
    given.store.request(uid, "restart", {}, time.time())
    return _now(given, uid)


@router.delete("/{uid:word}", status_code=204, responses=ANSWERS)
def remove(
    given: Given,
    uid: Uid,
    data: Annotated[bool, Query(description="its checkpoints and logs in storage too")] = False,
) -> None:
    """Forget a job that has ended: its events, metrics and logs, and by choice what it has in storage."""
    row = given.store.job(uid)
    given.store.remove(uid)  # first: who may not be removed keeps all
    if data:
        removal.emptied(jobview.folder(row, given.storage_root))


@router.patch(
    "/{uid:word}",
    responses={
        **ANSWERS,
        412: {"model": Problem, "description": "its spec has changed meanwhile"},
        422: {"model": Problem, "description": "what is wrong, and what would work"},
        428: {"model": Problem, "description": "If-Match is needed"},
    },
)
def change(
    given: Given,
    uid: Uid,
    body: Annotated[dict[str, Any], Body(json_schema_extra=amending.SCHEMA)],
    response: Response,
    if_match: Annotated[str | None, Header(max_length=64, description="the ETag of the job as it was read")] = None,
) -> JobView:
    """Change priority, queue, labels, elastic bounds, checkpoint policy or budgets, also while it runs: a JSON merge
    patch (RFC 7396) of its spec."""
    row = given.store.job(uid)
    if if_match is None:
        raise errors.Unconditional("If-Match is needed", hint=f"send If-Match: {jobview.tag(row)}", field="If-Match")
    _unless(row, [phase for phase in Phase if phase.terminal], "changed any more")
    spec = amending.applied(given, row, body)
    if if_match not in (jobview.tag(row), "*"):
        hint = f"read the job again: its ETag is {jobview.tag(row)}"
        raise errors.Changed(f"job {uid} has changed since it was {if_match}", hint=hint, field="If-Match")
    changed = given.store.change(uid, row.generation, spec.model_dump(mode="json"), time.time())
    response.headers["ETag"] = jobview.tag(changed)
    return jobview.of(changed, given.storage_root, time.time())


def _now(given: Given, uid: str) -> JobView:
    return jobview.of(given.store.job(uid), given.storage_root, time.time())


def _unless(row: JobRow, phases: Container[Phase], what: str) -> None:
    if Phase(row.phase) in phases:
        raise errors.Conflict(f"job {row.uid} can't be {what}: its phase is {row.phase}")


def _only(row: JobRow, what: str) -> None:
    if Phase(row.phase) not in AT_WORK:
        hint = "it has to make steps: its phase has to be running"
        raise errors.Conflict(f"job {row.uid} can't {what} now: its phase is {row.phase}", hint=hint)
