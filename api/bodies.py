"""No request body larger than a job file could ever be."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import errors as problems

LARGEST = 1 << 20  # bytes: a job file is a few hundred
DETAIL = f"the body is larger than {LARGEST} bytes"


class Bounded:
    """ASGI middleware: 413 as soon as a body is announced, or turns out, to be too large."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and int(Headers(scope=scope).get("content-length", 0)) > LARGEST:
            await problems.problem(413, DETAIL, problems.REASONS[413])(scope, receive, send)
            return
        total = 0

        async def receiver() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > LARGEST:
                raise HTTPException(413, DETAIL)
            return message

        await self._app(scope, receiver, send)
