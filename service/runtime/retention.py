"""Forgets what was told of jobs that ended long ago: events, metrics and logs, in the store and in storage. What became
of them stays, and their checkpoints.
"""

from __future__ import annotations

import logging
import threading
import time

from service.contracts.errors import Fenced, StoreUnavailable
from service.contracts.job import folder
from service.store.jobs import Store
from workers.checkpoint.storage import Storage

log = logging.getLogger("phalanx.retention")

LOOK_S = 600.0
DAY_S = 86_400.0


class Retention:
    """Of the controller that leads. `days`: that all is kept after the end of a job; 0: for ever."""

    def __init__(self, store: Store, epoch: int, storage: str, days: float) -> None:
        self.store, self.epoch, self.storage, self.days = store, epoch, storage, days
        self.over = threading.Event()

    def start(self) -> None:
        if self.days:
            threading.Thread(target=self._run, name="retention", daemon=True).start()

    def close(self) -> None:
        self.over.set()

    def turn(self, now: float) -> int:
        """How many jobs were forgotten. Their logs go first: what is left of them is found again by their rows."""
        count = 0
        for row in self.store.expired(now - self.days * DAY_S):
            root = row.spec.get("checkpoint", {}).get("root") or self.storage
            try:
                Storage.open(folder(root, row.uid)).delete("logs")
            except OSError as error:
                log.warning("logs of %s could not be removed: %s", row.uid, error)
                continue
            self.store.expire(self.epoch, row.uid)
            count += 1
        return count

    def _run(self) -> None:
        while not self.over.is_set():
            try:
                while self.turn(time.time()) and not self.over.is_set():
                    pass
            except Fenced:
                return
            except StoreUnavailable as error:
                log.warning("the store is away: %s", error)
            self.over.wait(LOOK_S)
