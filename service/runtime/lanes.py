"""Work in threads: one thing at a time for each key, in order; different keys side by side. Knows nothing of the work
itself."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger("phalanx.lanes")

Work = Callable[[], None]


class Lanes:
    """Work that raises is logged, and its lane goes on. After `close` nothing more begins; what has begun ends."""

    def __init__(self, threads: int) -> None:
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="lane")
        self.lock = threading.Lock()
        self.waiting: dict[str, deque[Work]] = {}
        self.closed = False

    def submit(self, key: str, work: Work) -> None:
        """Also from within work, of the same lane or another."""
        with self.lock:
            if self.closed:
                return
            if (queue := self.waiting.get(key)) is not None:
                queue.append(work)
                return
            self.waiting[key] = deque((work,))
            self.pool.submit(self._drain, key)

    def busy(self, key: str) -> bool:
        """Whether work of this lane is under way or waits."""
        with self.lock:
            return key in self.waiting

    def close(self) -> None:
        with self.lock:
            self.closed = True
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _drain(self, key: str) -> None:
        while (work := self._next(key)) is not None:
            try:
                work()
            except Exception:
                log.exception("work for %s failed", key)

    def _next(self, key: str) -> Work | None:
        with self.lock:
            queue = self.waiting[key]
            if queue and not self.closed:
                return queue.popleft()
            del self.waiting[key]
            return None
