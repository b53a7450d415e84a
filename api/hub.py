"""New events of all jobs, read once for all who follow one: however many streams there are, the store is asked by one.

Kept for a while, so that a reader who is close behind is answered from memory. Runs only while somebody follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from starlette.concurrency import run_in_threadpool

from api.feeds import Batch
from api.views import EventView
from service.contracts import errors
from service.contracts.job import Phase
from service.store.jobs import Store
from service.store.records import EventRow

log = logging.getLogger("phalanx.api")

POLL_S = 0.1
KEPT = 20_000  # events
READ = 1000


class Hub:
    """Of one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._since: int | None = None  # the event after which all are known here; None: it does not run
        self._newest, self._chunk = 0, 0  # ids of the last event and the last chunk of a log that were seen
        self._kept: deque[EventRow] = deque()
        self._of: defaultdict[str, deque[tuple[str, EventView]]] = defaultdict(deque)
        self._phases: dict[str, Phase] = {}
        self._followers: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closing = False

    def close(self) -> None:
        """The process is to end: streams end now, and their readers go on elsewhere. From any thread."""
        self.closing = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: self._wake(list(self._followers)))

    @contextlib.contextmanager
    def following(self, uid: str) -> Iterator[asyncio.Event]:
        """Set whenever there is something new of the job, in its log too."""
        news, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._followers[uid].add(news)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield news
        finally:
            self._followers[uid].discard(news)
            if not self._followers[uid]:
                del self._followers[uid]

    def events(self, uid: str, cursor: str, limit: int) -> tuple[Phase | None, Batch] | None:
        """What is new after `cursor`, and the phase where an event told it. None: not all of that is known here."""
        if self._since is None or int(cursor) < self._since:
            return None
        items = [item for item in self._of.get(uid, ()) if int(item[0]) > int(cursor)]
        batch = Batch(tuple(items[:limit]), items[:limit][-1][0] if items else cursor, len(items) <= limit)
        return self._phases.get(uid), batch

    async def _run(self) -> None:
        self._forget()
        try:
            while self._followers and not self.closing:
                try:
                    await self._look()
                except errors.ClusterError as error:
                    log.warning("the store is away", extra={"data": {"error": error.message}})
                await asyncio.sleep(POLL_S)
        finally:
            self._forget()

    async def _look(self) -> None:
        if self._since is None:
            self._newest, self._chunk = await run_in_threadpool(self._store.newest)
            self._since = self._newest
            self._wake(list(self._followers))  # what came before is for them to read
        rows = await run_in_threadpool(self._store.events, None, self._newest, READ)
        if rows:
            self._newest = rows[-1].id
            self._keep(rows)
        chunks = await run_in_threadpool(self._store.chunks_since, self._chunk)
        self._chunk = max([self._chunk, *chunks.values()])
        self._wake({row.job for row in rows} | set(chunks))

    def _keep(self, rows: Sequence[EventRow]) -> None:
        for row in rows:
            self._kept.append(row)
            self._of[row.job].append((str(row.id), EventView(**dataclasses.asdict(row))))
            if (phase := row.data.get("phase")) in list(Phase):
                self._phases[row.job] = Phase(phase)
        while len(self._kept) > KEPT:
            gone = self._kept.popleft()
            self._since = gone.id
            self._of[gone.job].popleft()
            if not self._of[gone.job]:
                del self._of[gone.job]
                self._phases.pop(gone.job, None)

    def _wake(self, jobs: Sequence[str] | set[str]) -> None:
        for uid in jobs:
            for news in self._followers.get(uid, ()):
                news.set()

    def _forget(self) -> None:
        self._since, self._newest, self._chunk = None, 0, 0
        self._kept.clear()
        self._of.clear()
        self._phases.clear()
