"""Work in threads: one thing at a time for each key, in order; different keys side by side. Knows nothing of the work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Lanes:
    """`submit(key, work)`; work must not raise."""

    def __init__(self, threads: int) -> None:
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="lane")
        self.lock = threading.Lock()
        self.waiting: dict[str, deque[Callable[[], None]]] = {}

    def submit(self, key: str, work: Callable[[], None]) -> None:
        with self.lock:
            if (queue := self.waiting.get(key)) is not None:
                queue.append(work)
                return
            self.waiting[key] = deque((work,))
        self.pool.submit(self._drain, key)

    def busy(self, key: str) -> bool:
        with self.lock:
            return key in self.waiting

    def _drain(self, key: str) -> None:
        while True:
            with self.lock:
                queue = self.waiting[key]
                if not queue:
                    del self.waiting[key]
                    return
                work = queue.popleft()
            work()

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
