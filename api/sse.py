"""A feed as server-sent events. Polls the store in threads, so that all streams share one event loop."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from api.feeds import Batch, Read
from service.contracts import errors
from service.contracts.job import Phase
from service.store.jobs import Store

log = logging.getLogger("phalanx.api")

POLL_S = 0.25
HEARTBEAT_S = 10
CLOSING_S = 2  # for a stream to end by itself when the process is to end
BATCH = 500


def wanted(accept: str | None, follow: bool) -> bool:
    return follow or "text/event-stream" in (accept or "")


def response(store: Store, uid: str, read: Read, cursor: str, follow: bool) -> EventSourceResponse:
    """Each item with its cursor as `id`; then `event: end` with the phase: after `follow` a terminal one."""
    closing = anyio.Event()
    return EventSourceResponse(
        _stream(store, uid, read, cursor, follow, closing),
        shutdown_event=closing,
        shutdown_grace_period=CLOSING_S,
        ping=HEARTBEAT_S,
        ping_message_factory=lambda: ServerSentEvent(comment="alive"),
    )


async def _stream(
    store: Store, uid: str, read: Read, cursor: str, follow: bool, closing: anyio.Event
) -> AsyncIterator[ServerSentEvent]:
    def turn(cursor: str) -> tuple[Phase, Batch]:
        # The phase first: what a terminal job still had to say is in the batch read after it.
        phase = Phase(store.job(uid).phase)
        return phase, read(cursor, BATCH)

    while not closing.is_set():  # when the process ends, the reader goes on elsewhere
        try:
            phase, batch = await run_in_threadpool(turn, cursor)
        except errors.ClusterError as error:  # the reader comes back with its cursor
            log.warning("stream cut", extra={"data": {"job": uid, "error": error.message}})
            return
        cursor = batch.position
        for key, item in batch.items:
            yield ServerSentEvent(item.model_dump_json(ensure_ascii=True), id=key)
        if batch.drained and (phase.terminal or not follow):
            yield ServerSentEvent(json.dumps({"phase": phase.value}), event="end")
            return
        if batch.drained:
            await asyncio.sleep(POLL_S)
