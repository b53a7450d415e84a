"""What the routes work with, kept on the app: the store, the storage root, and what a job may reach; and who asks."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from api.hub import Hub
from api.principal import Principal
from api.rules import Rules
from service.contracts import errors
from service.store.jobs import Store

UID = re.compile(r"[a-z0-9-]{1,80}")


@dataclasses.dataclass(frozen=True, slots=True)
class Door:
    store: Store
    storage_root: str
    rules: Rules

    @property
    def roots(self) -> tuple[str, ...]:
        return (self.storage_root, *self.rules.allowed_roots)


async def door(request: Request) -> Door:
    found = request.app.state.door
    assert isinstance(found, Door)
    return found


async def principal(request: Request) -> Principal:
    found = request.state.principal
    assert isinstance(found, Principal)
    return found


async def hub(request: Request) -> Hub:
    found = request.app.state.hub
    assert isinstance(found, Hub)
    return found


Given = Annotated[Door, Depends(door)]
News = Annotated[Hub, Depends(hub)]
Asking = Annotated[Principal, Depends(principal)]


def named(given: Door, asking: Principal, uid: str) -> str:
    """The uid of a job that whoever asks may see. A string of another shape names none, and never reaches the store;
    another project's job is none either."""
    if UID.fullmatch(uid) and (asking.project is None or asking.sees(given.store.job(uid).project)):
        return uid
    raise errors.NotFound(f"there is no job {uid!r}", hint="GET /v1/jobs lists them", field="uid")


async def _named(given: Given, asking: Asking, uid: str) -> str:
    """On a thread only where the store has to be asked."""
    if asking.project is None:
        return named(given, asking, uid)
    return await run_in_threadpool(named, given, asking, uid)


Uid = Annotated[str, Depends(_named)]
