"""A feed followed until its job is over: what is there already from the store, what comes then as the hub tells it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from starlette.concurrency import run_in_threadpool

from api.feeds import Batch, Read
from api.hub import Hub
from api.views import EventView, LogLine
from service.contracts import errors
from service.contracts.job import Phase
from service.store.jobs import Store

log = logging.getLogger("phalanx.api")

BATCH = 500
IDLE_S = 5.0  # between looks without news: a phase changes with an event, and a hub may have been late

Fast = Callable[[str, int], tuple[Phase | None, Batch] | None]
"""(cursor, limit) -> what is known without the store."""


async def items(
    store: Store,
    hub: Hub,
    uid: str,
    read: Read,
    cursor: str,
    follow: bool,
    fast: Fast | None = None,
) -> AsyncIterator[tuple[str, EventView | LogLine] | Phase]:
    """Each item with its cursor; at the end, where that was reached, the job's phase: with `follow` a terminal one."""

    def turn(cursor: str) -> tuple[Phase, Batch]:
        # The phase first: what a terminal job still had to say is in the batch read after it.
        phase = Phase(store.job(uid).phase)
        return phase, read(cursor, BATCH)

    with hub.following(uid) as news:
        sure = False  # of what the hub knows: it was told since the store was read
        while not hub.closing:  # when the process ends, the reader goes on elsewhere
            news.clear()
            known = fast(cursor, BATCH) if fast is not None and sure else None
            if known is None:
                try:
                    known = await run_in_threadpool(turn, cursor)
                except errors.NotFound:  # it was forgotten
                    return
                except errors.ClusterError as error:  # the reader comes back with its cursor
                    log.warning("stream cut", extra={"data": {"job": uid, "error": error.message}})
                    return
            phase, batch = known
            cursor = batch.position
            for item in batch.items:
                yield item
            if batch.drained and phase is not None and (phase.terminal or not follow):
                yield phase
                return
            if batch.drained:
                sure = await _told(news)


async def _told(news: asyncio.Event) -> bool:
    """Whether there is news, within a while."""
    try:
        await asyncio.wait_for(news.wait(), IDLE_S)
    except TimeoutError:
        return False
    return True
