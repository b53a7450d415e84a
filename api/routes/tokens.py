"""Tokens: made once, shown once, revoked. An operator's."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from api import tokens
from api.door import Given
from api.routes.jobs import REFUSED
from api.sent import Sent
from api.views import MadeToken, Problem, Tokens, TokenView
from service.store.records import Scope

router = APIRouter(prefix="/v1/tokens", tags=["tokens"])

MISSING: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "there is no such token, or project"}
}


class Asked(Sent):
    name: str = Field(min_length=1, max_length=100, description="for people: whose it is")
    scope: Scope = Field(default="submit", description="read, submit, or admin; each may what the one before may")
    project: str | None = Field(default=None, max_length=63, description="null: all of them")
    lasts_s: float | None = Field(default=None, gt=0, le=1e9, description="seconds until it opens nothing any more")


@router.post("", status_code=201, responses={**MISSING, **REFUSED})
def create(given: Given, asked: Asked) -> MadeToken:
    """The only answer that has the token itself."""
    made = tokens.make(given.store.access, asked.name, asked.scope, asked.project, asked.lasts_s, time.time())
    return MadeToken(token=made.text, **dataclasses.asdict(made.row))


@router.get("")
def listing(given: Given, project: str | None = None) -> Tokens:
    """Revoked and expired ones too."""
    return Tokens(tokens=tuple(TokenView(**dataclasses.asdict(row)) for row in given.store.access.tokens(project)))


@router.delete("/{id_:word}", status_code=204, responses=MISSING)
def revoke(given: Given, id_: str) -> None:
    """It opens nothing from a few seconds from now on."""
    given.store.access.revoke(id_, time.time())
