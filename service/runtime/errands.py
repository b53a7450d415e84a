"""What users ask of a checkpoint that takes long: to be verified, to be exported. In few threads of their own.

Needs no gang, and serves jobs that are over as well. An intent stays open until its answer is in the store, so that the
next controller does again what this one could not finish. Decides nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import ray

from service.contracts import events
from service.runtime import exporter, holds
from service.runtime.lanes import Lanes
from service.store.records import Intent
from workers.checkpoint import manifest
from workers.checkpoint.storage import Storage

log = logging.getLogger("phalanx.errands")

THREADS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Answered:
    """An errand is done."""

    intent: int
    event: events.CheckpointFact


class Errands:
    def __init__(self, inbox: Any) -> None:
        self.inbox = inbox
        self.lanes = Lanes(THREADS)
        self.open: set[int] = set()  # intents taken up, and not yet known as answered to the store
        self.over = threading.Event()

    def close(self) -> None:
        self.over.set()
        self.lanes.close()

    def begin(self, intent: Intent, folder: str) -> None:
        """`folder`: where the job keeps what it writes. Verifications of one job go one after the other."""
        self.open.add(intent.id)
        self.lanes.submit(f"{intent.kind} {intent.job}", partial(self._do, intent, folder))

    def answered(self, intents: Iterable[int]) -> None:
        """They are in the store."""
        self.open.difference_update(intents)

    def _do(self, intent: Intent, folder: str) -> None:
        try:
            event = (verified if intent.kind == "verify" else exported)(intent, folder)
        except Exception as error:
            if not isinstance(error, OSError | ray.exceptions.RayError):
                log.exception("%s of %s", intent.kind, intent.job)
            event = failed(intent, _last_line(error))
        if not self.over.is_set():
            self.inbox.put(Answered(intent.id, event))


def verified(intent: Intent, folder: str) -> events.CheckpointFact:
    """The verdict after every byte of it was read. OSError, and no verdict, where storage would not be read."""
    data = intent.data
    storage, path = Storage.open(folder), data["manifest"]
    with holds.held(storage, path):
        try:
            manifest.verify(storage, path)
        except manifest.BadCheckpoint as error:
            return events.CheckpointRejected(intent.job, data["attempt"], path, error.reason, time.time())
    return events.CheckpointVerified(intent.job, data["attempt"], data["step"], path, time.time())


def exported(intent: Intent, folder: str) -> events.CheckpointFact:
    data = intent.data
    with holds.held(Storage.open(folder), data["manifest"]):
        how = (data["to"], data["dtype"], data.get("adapter", False))
        problem = ray.get(exporter.task.remote(folder, data["manifest"], *how))
    if problem:
        return failed(intent, problem)
    return events.CheckpointExported(intent.job, data["step"], data["manifest"], data["to"], time.time())


def failed(intent: Intent, reason: str) -> events.CheckpointFact:
    data = intent.data
    if intent.kind == "verify":
        return events.CheckpointCheckFailed(intent.job, data["step"], data["manifest"], reason, time.time())
    return events.CheckpointExportFailed(intent.job, data["step"], data["manifest"], data["to"], reason, time.time())


def _last_line(error: BaseException) -> str:
    """Of a failed task Ray tells a traceback, and last what was raised."""
    return next(iter(reversed(str(error).strip().splitlines())), repr(error))
