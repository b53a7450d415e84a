"""Who asks, by his token, and whether he may what he asks for. Knows paths and headers; no route can be reached around
it. What was to change something is noted, whatever came of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import errors as problems
from api.ledger import Ledger
from api.pace import Pace
from api.principal import READS, Principal, needed
from api.tokens import Keys
from service.contracts import errors
from service.store.records import Audit

log = logging.getLogger("phalanx.api")

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Answered without a token. Everything else is refused, whether a route for it exists or not."""


class Bearer:
    """ASGI middleware: the token in `Authorization: Bearer ...`, or 401; one that may do it, or 403. Who asks is
    `scope["state"]["principal"]` from here on.
    """

    def __init__(self, app: ASGIApp, keys: Keys, per_s: float = 0.0) -> None:
        """`per_s`: requests of each token; 0: as many as it likes."""
        self._app, self._keys = app, keys
        self._pace = Pace(per_s) if per_s else None
        self._ledger = Ledger(keys.access)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            principal = await self._principal(Headers(scope=scope))
        except errors.PhalanxError as error:
            await problems.answer(error)(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        wants = needed(method, path)
        if not principal.may(wants):
            await problems.answer(_forbidden(principal, wants))(scope, receive, send)
            return
        if self._pace is not None and (wait_s := self._pace.wait_s(principal.name)):
            await problems.answer(errors.TooMany(f"{principal.name} asks too often", hint=f"try again in {wait_s} s"))(
                scope, receive, with_header(send, "Retry-After", str(wait_s))
            )
            return
        scope.setdefault("state", {})["principal"] = principal
        if wants == "read" or method in READS:
            await self._app(scope, receive, send)
        else:
            await self._noted(principal, scope, receive, send)

    async def _principal(self, headers: Headers) -> Principal:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and (text := given.strip()):
            known = self._keys.remembered(text) or await run_in_threadpool(self._keys.holder, text)
            if known is not None:
                return known
        raise _refusal(headers)

    async def _noted(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        who, what = (principal.name, principal.project), (scope["method"], scope["path"])

        async def sender(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._ledger.note(Audit(0, time.time(), *who, *what, message["status"]))
            await send(message)

        try:
            await self._app(scope, receive, sender)
        except Exception:
            await self._ledger.note(Audit(0, time.time(), *who, *what, 500))
            raise


def with_header(send: Send, name: str, value: str) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[name] = value
        await send(message)

    return sender


def _forbidden(principal: Principal, wants: str) -> errors.Forbidden:
    hint = "ask an operator for a token with that scope: phalanx token create"
    return errors.Forbidden(f"{principal.name} may {principal.scope}, and this needs {wants}", hint=hint)


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
