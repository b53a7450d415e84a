"""Projects and what was changed in them: an operator's."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from api.door import Given
from api.routes.jobs import REFUSED
from api.sent import Sent
from api.views import AuditPage, AuditView, Problem, Projects, ProjectView
from service.contracts.job import NAME

router = APIRouter(prefix="/v1", tags=["projects"])

MISSING: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "there is no such project"}}
Slots = Annotated[int | None, Field(gt=0, le=1_000_000, description="that its jobs may hold together; null: no bound")]


class Asked(Sent):
    name: str = Field(pattern=NAME)
    slots: Slots = None


class Quota(Sent):
    slots: Slots


@router.post("/projects", status_code=201, responses={409: {"model": Problem, "description": "it is there"}, **REFUSED})
def create(given: Given, asked: Asked, response: Response) -> ProjectView:
    made = given.store.access.add_project(asked.name, asked.slots, time.time())
    response.headers["Location"] = f"/v1/projects/{made.name}"
    return ProjectView(**dataclasses.asdict(made))


@router.get("/projects")
def listing(given: Given) -> Projects:
    return Projects(projects=tuple(ProjectView(**dataclasses.asdict(row)) for row in given.store.access.projects()))


@router.put("/projects/{name:word}/quota", responses={**MISSING, **REFUSED})
def quota(given: Given, name: str, asked: Quota) -> ProjectView:
    """From now on; what runs goes on."""
    return ProjectView(**dataclasses.asdict(given.store.access.set_slots(name, asked.slots)))


@router.get("/audit")
def audit(
    given: Given,
    project: str | None = None,
    after: Annotated[int, Query(ge=0, lt=2**53)] = 0,
    limit: Annotated[int, Query(ge=1, le=5000)] = 500,
) -> AuditPage:
    """Who changed what, or tried to, oldest first, after the entry `after`."""
    entries = tuple(AuditView(**dataclasses.asdict(row)) for row in given.store.access.audit(project, after, limit))
    return AuditPage(entries=entries, after=entries[-1].id if entries else after)
