"""Webhooks: who is told of events. An operator's."""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field

from api.door import Given
from api.routes.jobs import REFUSED
from api.sent import Sent
from api.views import Hooks, HookView, Problem
from service.contracts.runtime import Reference
from service.store.records import HookRow

router = APIRouter(prefix="/v1/hooks", tags=["hooks"])

MISSING: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "there is no such webhook, or project"}
}
TYPES = (
    "JobQueued", "JobStarted", "JobRunning", "JobSuspended", "JobSucceeded", "JobFailed", "JobCancelled",
    "IncidentOpened", "IncidentClosed",
)  # fmt: skip
"""Phases that a job enters, and incidents."""


class Asked(Sent):
    url: str = Field(pattern=r"^https?://[^\s/@?#]+(/[^\s#]*)?$", max_length=2000)
    secret: Reference = Field(description="where the controller finds the key of its signatures, such as env:NAME")
    types: tuple[str, ...] = Field(default=TYPES, min_length=1, max_length=100, description="of events")
    project: str | None = Field(default=None, max_length=63, description="null: all of them")


@router.post("", status_code=201, responses={**MISSING, **REFUSED})
def create(given: Given, asked: Asked, response: Response) -> HookView:
    """It is told what comes from now on, in order, each until it answers with 2xx."""
    row = HookRow(secrets.token_hex(6), asked.url, asked.secret, asked.project, asked.types, time.time())
    made = given.store.hooks.add(row)
    response.headers["Location"] = f"/v1/hooks/{made.id}"
    return HookView(**dataclasses.asdict(made))


@router.get("")
def listing(given: Given) -> Hooks:
    """With how far each was told, and why no further."""
    return Hooks(hooks=tuple(HookView(**dataclasses.asdict(row)) for row in given.store.hooks.all()))


@router.delete("/{id_:word}", status_code=204, responses=MISSING)
def remove(given: Given, id_: str) -> None:
    given.store.hooks.remove(id_)
