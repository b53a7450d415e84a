"""Page tokens: opaque to the caller, so that what they hold may change."""

from __future__ import annotations

import base64
import binascii
import re

from service.contracts import errors


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
