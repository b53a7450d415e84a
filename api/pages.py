"""Page tokens, opaque to the caller, so that what they hold may change; and what a list is asked for."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence

from service.contracts import errors
from service.contracts.job import Phase
from service.store.records import Which


def which(phases: Sequence[Phase], name: str, labels: Sequence[str], project: str | None) -> Which:
    """`labels`: `key=value`, or `key` alone for any value."""
    wanted: dict[str, str | None] = {}
    for label in labels:
        key, sign, value = label.partition("=")
        if not key:
            hint = "write key=value, or key for any value"
            raise errors.UserError(f"label: {label!r} names no label", hint=hint, field="label")
        wanted[key] = value if sign else None
    return Which(tuple(phases), name, wanted, project)


def token(seq: int) -> str:
    return base64.urlsafe_b64encode(f"seq:{seq}".encode()).decode().rstrip("=")


def seq(token: str) -> int:
    """The jobs before which the page begins."""
    try:
        kind, _, number = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode().partition(":")
        if kind == "seq" and re.fullmatch(r"[0-9]{1,18}", number):
            return int(number)
    except (binascii.Error, ValueError):
        pass
    raise errors.UserError(
        f"page: {token!r} is not a page token",
        hint="take next_page of the answer before, or leave page out",
        field="page",
    )
