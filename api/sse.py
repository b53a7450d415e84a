"""A feed as a stream: server-sent events, or lines of JSON. Each item comes with its cursor, at which a reader who was
cut goes on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Literal

import anyio
from fastapi.responses import StreamingResponse
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from api.views import EventView, LogLine
from service.contracts.job import Phase

HEARTBEAT_S = 10
CLOSING_S = 2  # for a stream to end by itself when the process is to end
LINES = "application/x-ndjson"

Items = AsyncIterator[tuple[str, EventView | LogLine] | Phase]
Kind = Literal["sse", "ndjson"]


def wanted(accept: str | None, follow: bool) -> Kind | None:
    """What kind of stream; None: a page."""
    if LINES in (accept or ""):
        return "ndjson"
    return "sse" if follow or "text/event-stream" in (accept or "") else None


def response(kind: Kind, items: Items) -> Response:
    if kind == "ndjson":
        return StreamingResponse(_lines(items), media_type=LINES)
    return EventSourceResponse(
        _messages(items),
        shutdown_event=anyio.Event(),  # the hub says it as well: so long it may take
        shutdown_grace_period=CLOSING_S,
        ping=HEARTBEAT_S,
        ping_message_factory=lambda: ServerSentEvent(comment="alive"),
    )


async def _messages(items: Items) -> AsyncIterator[ServerSentEvent]:
    """Each item with its cursor as `id`; then `event: end` with the phase."""
    async for item in items:
        if isinstance(item, Phase):
            yield ServerSentEvent(json.dumps({"phase": item.value}), event="end")
        else:
            yield ServerSentEvent(item[1].model_dump_json(ensure_ascii=True), id=item[0])


async def _lines(items: Items) -> AsyncIterator[str]:
    """`{"cursor": ..., "item": ...}`, then `{"end": phase}`; an empty line now and then where there is nothing new."""
    turn = asyncio.ensure_future(anext(items, None))
    try:
        while True:
            done, _ = await asyncio.wait([turn], timeout=HEARTBEAT_S)
            if not done:
                yield "\n"
                continue
            item = turn.result()
            if item is None:
                return
            if isinstance(item, Phase):
                yield json.dumps({"end": item.value}) + "\n"
            else:
                yield f'{{"cursor": {json.dumps(item[0])}, "item": {item[1].model_dump_json(ensure_ascii=True)}}}\n'
            turn = asyncio.ensure_future(anext(items, None))
    finally:  # also where the reader has gone
        turn.cancel()
