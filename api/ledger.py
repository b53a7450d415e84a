"""What was changed and by whom, on its way into the store: whatever comes at once is written at once.

Nobody is answered before what he did is noted.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.concurrency import run_in_threadpool

from service.contracts import errors
from service.store.access import Access
from service.store.records import Audit

log = logging.getLogger("phalanx.api")


class Ledger:
    """Of one event loop."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._waiting: list[tuple[Audit, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def note(self, entry: Audit) -> None:
        """Returns once it is written; also where the store is away: the request could not have changed anything."""
        noted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, noted))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())
        await noted

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await run_in_threadpool(self._access.note, [entry for entry, _ in batch])
            except errors.ClusterError as error:
                targets = [entry.target for entry, _ in batch]
                log.warning("not noted", extra={"data": {"targets": targets, "error": error.message}})
            finally:
                for _, noted in batch:
                    if not noted.done():
                        noted.set_result(None)
