"""Another size for a job that is under way: what it would come to now, or the wish itself. The core meets it."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from api import checks
from api.door import Door, Given, Uid
from api.sent import Sent
from api.views import Problem, Rescaled
from service.contracts import errors
from service.contracts.errors import PlacementRefused
from service.contracts.job import Phase, parse_job
from service.core import codec, elastic
from service.core.state import Job
from workers.spec import ParallelLayout

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

ANSWERS: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "there is no such job"},
    409: {"model": Problem, "description": "the job is over, or ends"},
    422: {"model": Problem, "description": "the job can't be made one of this size; the hint says which it can"},
}


class Rescale(Sent):
    slots: int = Field(gt=0, le=1_000_000)
    parallel: ParallelLayout | None = Field(default=None, description="default: as in the job, with another dp")


@router.post("/{uid:word}:rescale", status_code=202, responses=ANSWERS)
def rescale(
    given: Given,
    uid: Uid,
    body: Rescale,
    dry_run: Annotated[bool, Query(description="tell, and change nothing")] = False,
) -> Rescaled:
    """Have the job run on so many slots from now on. It pauses after a step and goes on; nothing is done again."""
    row = given.store.job(uid)
    if (phase := Phase(row.phase)).terminal or phase in (Phase.FINISHING, Phase.CANCELLING):
        raise errors.Conflict(f"job {uid} can't be rescaled any more: its phase is {phase}")
    spec = parse_job(row.spec)
    try:
        elastic.asking_for(spec, body.slots, body.parallel)
    except PlacementRefused as refused:
        raise errors.UserError(refused.message, hint=refused.hint, field="slots") from None
    layout, possible, reason = _preview(given, uid, row.seq, row.created_at, spec, body)
    if not dry_run:
        data = {"slots": body.slots, "layout": body.parallel and body.parallel.model_dump(mode="json")}
        given.store.request(uid, "rescale", data, time.time())
    return Rescaled(uid=uid, slots=body.slots, layout=layout, possible=possible, reason=reason, asked=not dry_run)


def _preview(
    given: Door, uid: str, seq: int, created_at: float, spec: Any, body: Rescale
) -> tuple[ParallelLayout | None, bool, str]:
    """(layout, whether there is room for it now, why)."""
    cores = {row.uid: codec.load(core) for row, core in given.store.unfinished() if core}
    job = cores.pop(uid, None) or Job(uid, seq, spec, created_at)
    taken = {(slot.node, slot.index) for other in cores.values() for slot in other.held}
    found = elastic.rescale_preview(job, body.slots, body.parallel, checks.fleet(given.store.nodes()), taken)
    if isinstance(found, PlacementRefused):
        return None, False, found.message
    return found.layout, True, found.reason
