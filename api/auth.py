"""Who may ask: whoever holds the token. Knows paths and headers; no route can be reached around it."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api import errors as problems
from service.contracts import errors

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Answered without a token. Everything else is refused, whether a route for it exists or not."""


class Bearer:
    """ASGI middleware: the token in `Authorization: Bearer ...`, or 401."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._admits(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            await problems.answer(_refusal(Headers(scope=scope)))(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return hmac.compare_digest(given.strip().encode(), self._token) and scheme.lower() == "bearer"


def _refusal(headers: Headers) -> errors.Unauthorized:
    wrong = "authorization" in headers
    return errors.Unauthorized(
        "the token is not the one of this API" if wrong else "a token is needed",
        hint="send 'Authorization: Bearer TOKEN'; the token is in the file 'token' of the API's home",
        field="Authorization",
    )


def load_or_create_token(home: Path) -> str:
    """The token in `{home}/token`, mode 0600; made once, also when several processes start together."""
    path = home / "token"
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True)
        draft = home / f".token-{secrets.token_hex(8)}"
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        try:
            # A link appears whole or not at all, and never replaces another process's token.
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(draft)
        finally:
            draft.unlink()
    token = path.read_text().strip()
    if not token:
        hint = "delete it: a new one is made at the next start"
        raise errors.UserError(f"the token file {path} is empty", hint=hint)
    return token
