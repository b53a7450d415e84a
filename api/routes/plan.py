"""What a job would be on a fleet, before anything runs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body
from pydantic import Field

from api import checks, planview
from api.door import Given
from api.routes.jobs import REFUSED
from api.sent import Sent
from api.views import PlanView
from service.contracts import errors, job
from service.core.plan import fleetfile

router = APIRouter(prefix="/v1", tags=["plan"])

MOST_TOKENS = 1e18


class Asked(Sent):
    """`job` is what would be submitted; `fleet`, where it is not the one that is seen, has racks or nodes."""

    job: dict[str, Any]
    fleet: dict[str, Any] | None = None
    tokens: float | None = Field(
        default=None, gt=0, le=MOST_TOKENS, description="days and GPU-hours to; default the job's"
    )


@router.post("/plan", responses=REFUSED)
def plan(given: Given, asked: Annotated[Asked, Body()]) -> PlanView:
    """The layout and why, the next best, where ranks stand, memory, and parts of a step. Nothing is started."""
    try:
        spec = job.parse_job(asked.job)
    except errors.UserError as error:
        field = f"job.{error.field}" if error.field else "job"
        raise errors.UserError(error.message, hint=error.hint, field=field) from error
    fleet = checks.fleet(given.store.nodes()) if asked.fleet is None else fleetfile.parse(asked.fleet).fleet()
    return planview.made(spec, fleet, asked.tokens)
