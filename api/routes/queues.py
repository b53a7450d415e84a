"""Queues: their priorities are an operator's, to see them is everybody's."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from api.door import Given
from api.routes.jobs import REFUSED
from api.sent import Sent
from api.views import Problem, Queues, QueueView
from service.contracts.job import NAME

router = APIRouter(prefix="/v1/queues", tags=["queues"])

MISSING: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "there is no such queue"}}
Priority = Annotated[int, Field(ge=-1000, le=1000, description="jobs of a queue of a higher one come first")]


class Asked(Sent):
    name: str = Field(pattern=NAME)
    priority: Priority = 0


class Changed(Sent):
    priority: Priority


@router.post("", status_code=201, responses={409: {"model": Problem, "description": "it is there"}, **REFUSED})
def create(given: Given, asked: Asked, response: Response) -> QueueView:
    made = given.store.access.add_queue(asked.name, asked.priority, time.time())
    response.headers["Location"] = f"/v1/queues/{made.name}"
    return QueueView(**dataclasses.asdict(made))


@router.get("")
def listing(given: Given) -> Queues:
    return Queues(queues=tuple(QueueView(**dataclasses.asdict(row)) for row in given.store.access.queues()))


@router.put("/{name:word}", responses={**MISSING, **REFUSED})
def change(given: Given, name: str, asked: Changed) -> QueueView:
    """From now on, of all its jobs."""
    return QueueView(**dataclasses.asdict(given.store.access.set_priority(name, asked.priority)))
