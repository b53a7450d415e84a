"""What the routes work with, kept on the app: the store, the storage root, and what a job may reach."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated

from fastapi import Depends, Request

from service.contracts import errors
from service.store.jobs import Store

UID = re.compile(r"[a-z0-9-]{1,80}")


@dataclasses.dataclass(frozen=True, slots=True)
class Door:
    store: Store
    storage_root: str
    allowed_roots: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    @property
    def roots(self) -> tuple[str, ...]:
        return (self.storage_root, *self.allowed_roots)


def door(request: Request) -> Door:
    found = request.app.state.door
    assert isinstance(found, Door)
    return found


def named(uid: str) -> str:
    """A uid in the shape that uids have; another string names no job, and never reaches the store."""
    if UID.fullmatch(uid):
        return uid
    raise errors.NotFound(f"there is no job {uid!r}", hint="GET /v1/jobs lists them", field="uid")


Given = Annotated[Door, Depends(door)]
Uid = Annotated[str, Depends(named)]
