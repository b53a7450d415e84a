"""The controller's actor: answers agents, and leads whenever it holds the lease.

One named, detached actor that Ray starts again whenever it ends. What it knows is in the store; a new one reads it,
takes the lease under a higher epoch, and adopts the gangs that it finds at work.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from service.contracts.errors import Fenced, PhalanxError
from service.runtime.outbox import Said
from service.runtime.reign import Deliveries, Heard, Item, Reign
from service.settings import Settings
from service.store.jobs import Store

log = logging.getLogger("phalanx.controller")

LEASE_POLL_S = 0.25
START_OVER_S = 1.0


class Controller:
    def __init__(self, settings: Settings) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True)
        self.settings = settings
        self.identity = ray.get_runtime_context().get_actor_id()
        self.holder = f"{self.identity}/{os.getpid()}-{secrets.token_hex(4)}"
        self.inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.deliveries = Deliveries()
        self.reign: Reign | None = None
        threading.Thread(target=self._live, name="controller", daemon=True).start()

    def hear(self, job: str, attempt: int, node: str, said: Sequence[Said]) -> int:
        """Takes in what an agent says. The number up to which it is in the store; the agent tells the rest again."""
        source = (job, attempt, node)
        if self.reign is not None and self.deliveries.enter(source):
            self.inbox.put(Heard(source, said))
        return self.deliveries.committed(source)

    def status(self) -> dict[str, Any]:
        """Who this is and whether it leads."""
        epoch = self.reign.epoch if self.reign else None
        return {"pid": os.getpid(), "holder": self.holder, "epoch": epoch}

    def _live(self) -> None:
        while True:
            try:
                store = Store.open(self.settings.store)
                try:
                    self._lead(store)
                finally:
                    self.reign = None
                    store.close()
            except Fenced as fenced:
                log.warning("no longer leading: %s", fenced)
            except PhalanxError as error:
                log.warning("starting over: %s", error)
            except Exception:
                log.exception("starting over")
            time.sleep(START_OVER_S)

    def _lead(self, store: Store) -> None:
        epoch = self._wait_for_lease(store)
        reign = Reign(epoch, self.holder, store, self.settings, self.inbox, self.deliveries)
        try:
            reign.begin()
            self.reign = reign
            while True:
                reign.turn()
        finally:
            reign.end()

    def _wait_for_lease(self, store: Store) -> int:
        """The epoch, once the lease is ours. Ray runs this actor once: its earlier self's lease is taken over."""
        while True:
            holder, epoch = store.holder()
            if holder.startswith(f"{self.identity}/") and holder != self.holder:
                store.release(holder, epoch)
            if (mine := store.acquire(self.holder, self.settings.lease_ttl_s)) is not None:
                return mine
            time.sleep(LEASE_POLL_S)


ControllerActor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=32)(Controller)
