"""Carries out commands in threads, job by job in order, and answers with events in the controller's inbox.

Knows Ray and storage; decides nothing. What fails for a passing reason is tried again here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import ray

from service.contracts import events
from service.contracts.cluster import Fleet
from service.contracts.errors import ClusterError, Fenced
from service.core.commands import Command, StartGang, StopGang
from service.core.state import Job
from service.runtime import gang
from service.runtime.ear import AgentGone, Complete
from service.runtime.lanes import Lanes
from service.settings import Settings
from workers.checkpoint import manifest
from workers.checkpoint.publisher import Publisher
from workers.checkpoint.shards import Corrupt
from workers.checkpoint.storage import Storage

log = logging.getLogger("phalanx.hands")

RETRY_S = 1.0
PUBLISH_TRIES = 5
RESUME_FROM = 8  # checkpoints that an attempt may walk back over
THREADS = 32


class Hands:
    def __init__(self, epoch: int, settings: Settings, inbox: Any) -> None:
        self.epoch, self.settings, self.inbox = epoch, settings, inbox
        self.lanes = Lanes(THREADS)
        self.stopped: dict[str, int] = {}  # job -> newest attempt that was told to stop
        self.over = threading.Event()

    def close(self) -> None:
        self.over.set()
        self.lanes.close()

    def do(self, command: Command, job: Job, fleet: Fleet) -> bool:
        """Begin a command; True when a new attempt is to be listened to."""
        match command:
            case StartGang():
                addresses = {node.id: node.address for node in fleet.nodes}
                self.lanes.submit(job.uid, partial(self._start, command, job, addresses))
                return True
            case StopGang():
                self.stop(command.uid, command.attempt)
                return False

    def stop(self, uid: str, attempt: int) -> None:
        """Also gives up a start of this attempt that is under way."""
        self.stopped[uid] = attempt
        self.lanes.submit(uid, partial(self._stop, uid, attempt))

    def publish(self, job: Job, complete: Complete) -> None:
        self.lanes.submit(_publishing(job.uid, job.attempt), partial(self._publish, job, complete))

    def publishing(self, uid: str, attempt: int) -> bool:
        return self.lanes.busy(_publishing(uid, attempt))

    def watch(self, job: Job) -> None:
        """Tell when an agent of the job's gang is gone."""
        for node, agent in gang.agents(job.uid).items():
            arguments = (job.uid, job.attempt, node, agent)
            threading.Thread(target=self._wait_end, args=arguments, name=f"watch {node}", daemon=True).start()

    def sweep(self, owned: set[str]) -> None:
        """End what no live attempt owns."""
        self.lanes.submit("sweep", partial(self._sweep, owned))

    def _start(self, command: StartGang, job: Job, addresses: dict[str, str]) -> None:
        uid, attempt = command.uid, command.attempt
        root = job.spec.checkpoint.root or self.settings.storage
        try:
            resume = resumable(Storage.open(root).child(uid), job.checkpoint, command.rejected)
            order = gang.Order(self.epoch, job.spec, root, self.settings.scratch, addresses, resume)
            gang.start(command, order, abandoned=lambda: self.stopped.get(uid, 0) >= attempt or self.over.is_set())
            self.watch(job)
        except Exception as error:
            if not isinstance(error, gang.GangRefused | OSError):
                log.exception("starting %s", uid)
            self._free(uid)
            self._tell(events.GangRefused(uid, attempt, str(error) or repr(error), time.time()))
        else:
            self._tell(events.GangStarted(uid, attempt, time.time()))

    def _stop(self, uid: str, attempt: int) -> None:
        self._free(uid)
        self._tell(events.GangStopped(uid, attempt, time.time()))

    def _free(self, uid: str) -> None:
        """Until everything of the job is gone, or this reign."""
        while not self.over.is_set():
            try:
                for stopped in gang.stop(uid, self.epoch):
                    self.inbox.put(stopped)
                return
            except Fenced:
                return
            except (ClusterError, ray.exceptions.RayError) as error:
                log.warning("stopping %s: %s", uid, error)
                self.over.wait(RETRY_S)

    def _publish(self, job: Job, complete: Complete) -> None:
        assert job.layout is not None
        root = job.spec.checkpoint.root or self.settings.storage
        storage = Storage.open(root).child(job.uid)
        token = manifest.token_of(complete.records[0].index)  # of the epoch that started the gang
        publisher = Publisher(storage, job.uid, job.attempt, token, job.spec.run(job.layout))
        try:
            path = self._patiently(lambda: publisher.publish(complete.step, complete.records))
        except FileExistsError:  # by an earlier try whose answer was lost; the name is this attempt's own
            path = manifest.path(complete.step, job.attempt)
        except (OSError, manifest.Incomplete, Corrupt) as error:
            reason = f"not published: {error}"
            self._tell(events.SaveFailed(job.uid, job.attempt, complete.step, reason, time.time()))
            return
        self._tell(events.CheckpointPublished(job.uid, job.attempt, complete.step, path, time.time()))
        try:
            publisher.retain(job.rejected)
        except OSError as error:
            log.warning("old checkpoints of %s could not be removed: %s", job.uid, error)

    def _patiently(self, work: Callable[[], str]) -> str:
        """Try again while storage is away; the last OSError is raised."""
        for _ in range(PUBLISH_TRIES - 1):
            try:
                return work()
            except FileExistsError:
                raise
            except OSError as error:
                log.warning("storage is away: %s", error)
                self.over.wait(RETRY_S)
        return work()

    def _sweep(self, owned: set[str]) -> None:
        try:
            for uid in gang.jobs_held() - owned:
                log.warning("%s is held by no live attempt: ending it", uid)
                self.lanes.submit(uid, partial(self._free, uid))
        except ray.exceptions.RayError as error:
            log.warning("sweep: %s", error)

    def _wait_end(self, uid: str, attempt: int, node: str, agent: Any) -> None:
        try:
            ray.get(agent.wait_end.remote())
        except ray.exceptions.RayError as error:
            message = f"the agent on node {node} is gone: {type(error).__name__}"
            self._tell(AgentGone(uid, attempt, node, message))

    def _tell(self, event: events.Event | AgentGone) -> None:
        if not self.over.is_set():
            self.inbox.put(event)


def resumable(storage: Storage, newest: str | None, rejected: Collection[str]) -> tuple[str, ...]:
    """The checkpoints that an attempt may continue at, newest first. OSError where there must be one and is none:
    to begin again at the seed would throw away what was trained.
    """
    published = manifest.published(storage)
    if newest is not None and not published:
        raise OSError(f"{newest} was published, and {storage.uri} holds no checkpoint: is it mounted?")
    return tuple(path for path in published if path not in rejected)[:RESUME_FROM]


def _publishing(uid: str, attempt: int) -> str:
    return f"publish {uid} {attempt}"
