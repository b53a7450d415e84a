"""Checkpoints: list, look into, verify, go back to, fork from, export. What takes long is asked of the controller."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Response
from pydantic import Field

from api import checkpoints, checks, jobview, patch, restoring, submission
from api.door import Asking, Given, Uid
from api.sent import Sent
from api.views import Asked, Checkpoints, ManifestView, Problem
from service.contracts import errors, job
from service.contracts.status import JobView

router = APIRouter(prefix="/v1/jobs", tags=["checkpoints"])

ANSWERS: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "there is no such job or checkpoint; the hint names the good ones"},
    409: {"model": Problem, "description": "the checkpoint is damaged or rejected, or the job can't go there"},
    422: {"model": Problem, "description": "what is wrong, and what would work"},
}

Step = Annotated[str, Path(pattern=r"^(newest|[0-9]{1,15})$", description="or `newest`: the newest good one")]
Attempt = Annotated[int | None, Query(ge=0, lt=2**31, description="that published it; default the newest")]


class Fork(Sent):
    step: int | None = Field(default=None, ge=0, lt=2**53, description="default: of the newest good checkpoint")
    attempt: int | None = Field(default=None, ge=0, lt=2**31)
    overrides: dict[str, Any] = Field(default={}, description="what is other than in the job: a JSON merge patch")


class Export(Sent):
    to: str = Field(description="a new folder under a storage root of the service: a path or fsspec URI")
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = Field(default=None, description="as stored")
    adapter: bool = Field(default=False, description="the adapters alone, as PEFT has them; default merged")


@router.get("/{uid:word}/checkpoints")
def listing(given: Given, uid: Uid) -> Checkpoints:
    """Newest first."""
    return Checkpoints(checkpoints=tuple(checkpoints.listed(given, given.store.job(uid))))


@router.get("/{uid:word}/checkpoints/{step:word}", responses=ANSWERS)
def one(given: Given, uid: Uid, step: Step, attempt: Attempt = None) -> ManifestView:
    """What its manifest in storage says."""
    row = given.store.job(uid)
    view = checkpoints.known(given, row, _number(step), attempt)
    return checkpoints.shown(checkpoints.manifest_of(given, row, view), view)


@router.post("/{uid:word}/checkpoints/{step:word}:verify", status_code=202, responses=ANSWERS)
def verify(given: Given, uid: Uid, step: Step, attempt: Attempt = None) -> Asked:
    """Have every byte of it read and checked. One that is damaged is never used again."""
    after, row = given.store.last_event(uid), given.store.job(uid)
    view = checkpoints.usable(given, row, _number(step), attempt)
    given.store.request(uid, "verify", restoring.named(view), time.time())
    return Asked(kind="verify", checkpoint=view, after=after)


@router.post("/{uid:word}/checkpoints/{step:word}:restore", status_code=202, responses=ANSWERS)
def restore(given: Given, uid: Uid, step: Step, attempt: Attempt = None) -> JobView:
    """Have the job go back to it. Newer ones are never used again; a job that is over is forked instead."""
    return restoring.begun(given, uid, _number(step), attempt)


@router.post("/{uid:word}/checkpoints/{step:word}:export", status_code=202, responses=ANSWERS)
def export(given: Given, uid: Uid, step: Step, body: Export, attempt: Attempt = None) -> Asked:
    """Have its model written as a Hugging Face folder."""
    after, row = given.store.last_event(uid), given.store.job(uid)
    checks.written(body.to, given.roots, "to")
    view = checkpoints.usable(given, row, _number(step), attempt)
    asked = {"to": body.to, "dtype": body.dtype, "adapter": body.adapter}
    given.store.request(uid, "export", {**restoring.named(view), **asked}, time.time())
    return Asked(kind="export", checkpoint=view, after=after, to=body.to)


@router.post("/{uid:word}:fork", status_code=201, responses={200: {"model": JobView}, **ANSWERS})
def fork(
    given: Given,
    asking: Asking,
    uid: Uid,
    response: Response,
    body: Fork | None = None,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> JobView:
    """A new job that begins at a checkpoint of this one, also of one that is over."""
    asked, now = body or Fork(), time.time()
    if "init_from" in asked.overrides:
        raise errors.UserError("overrides can't name init_from: it is what a fork sets", field="overrides.init_from")
    start = {"job": uid, "step": asked.step, "attempt": asked.attempt}
    parent = given.store.job(uid)
    spec = job.parse_job({**patch.merged(parent.spec, asked.overrides), "init_from": start})
    row, created = submission.submit(given, asking, spec, idempotency_key, now, parent.project)
    response.status_code = 201 if created else 200
    response.headers["Location"] = f"/v1/jobs/{row.uid}"
    return jobview.of(row, given.storage_root, now)


def _number(step: str) -> int | None:
    return None if step == "newest" else int(step)
