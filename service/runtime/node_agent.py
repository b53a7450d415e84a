"""One actor a node and job: holds the node's devices, starts its ranks' training, notices their deaths, ends them,
gathers what they say and passes it on to the controller, ships their logs.

It outlives the controller: what the controller has not confirmed is kept and told again. Orders carry the epoch of the
controller's lease; one from an older epoch is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from service.contracts.errors import ClusterError, Fenced
from service.runtime import logs, processes
from service.runtime.shelf import Place
from workers.checkpoint.storage import Storage
from workers.reports import Failed, Finished, Moved, Report, ShardSaved, SnapshotTaken
from workers.spec import Assignment

REPORT_S = 1.0
KEPT_SHARDS = 64
Said = tuple[int, Any]  # (number, what was said)


@dataclasses.dataclass(frozen=True, slots=True)
class RankDied:
    """A rank's process is gone and had not finished."""

    rank: int
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One rank of this node."""

    assignment: Assignment
    actor: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """What an agent answers to a controller that comes back."""

    attempt: int
    pids: dict[int, int]  # rank -> pid, of those alive and at work
    ended: tuple[Finished | Failed, ...]
    shards: tuple[ShardSaved, ...]  # the newest ones


@dataclasses.dataclass(frozen=True, slots=True)
class Stopped:
    """What an agent answers to the order to stop."""

    job: str
    attempt: int
    node: str
    left: tuple[int, ...]  # pids that would not go
    unsaid: tuple[Said, ...]  # what the controller has not confirmed


class NodeAgent:
    def __init__(
        self,
        epoch: int,
        job: str,
        attempt: int,
        node: str,
        controller: str,
        namespace: str,
        root: str,
        scratch: str,
    ) -> None:
        self.epoch, self.job, self.attempt, self.node = epoch, job, attempt, node
        self.controller, self.namespace = controller, namespace
        self.storage = Storage.open(root).child(job)
        self.folder, self.kept = Path(scratch) / job / f"{attempt:06d}-{node}", Path(scratch) / "kept"
        self.lock = threading.Lock()
        self.shipping = threading.Lock()
        self.wake = threading.Event()
        self.pids: dict[int, int] = {}  # rank -> pid, of every rank that was born here
        self.at_work: set[int] = set()  # ranks with an assignment
        self.ended: dict[int, Finished | Failed] = {}
        self.shards: list[ShardSaved] = []
        self.unsaid: list[Said] = []
        self.number = 0
        self.stopping = False
        self.rendezvous: Any = None
        self.watch = processes.Watch()
        self.shipper = logs.Shipper(self.folder, self.storage, attempt, node)
        for work in (self._report, self._ship_logs, self._notice_deaths):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    # Orders

    def host_store(self, epoch: int, address: str) -> tuple[str, int]:
        """Open the rendezvous store on this node, outside the ranks. (IP literal, port)."""
        self._obey(epoch)
        from torch.distributed import TCPStore

        self.rendezvous = TCPStore(address, 0, None, True, wait_for_workers=False)
        return address, self.rendezvous.port

    def start(self, epoch: int, members: Sequence[Member], memory: Place | None) -> None:
        """Hand each rank of this node its assignment, and where snapshots are."""
        self._obey(epoch)
        gpus = ray.get_gpu_ids()
        devices = ",".join(str(gpu) for gpu in gpus) if gpus else None
        folders = (str(self.folder), str(self.kept))
        ray.get([member.actor.assign.remote(member.assignment, *folders, devices, memory) for member in members])
        with self.lock:
            self.at_work = {member.assignment.rank for member in members}

    def stop(self, epoch: int) -> Stopped:
        """End every rank of this node, and ship the rest of their logs."""
        self._obey(epoch)
        with self.lock:
            self.stopping = True
        left = processes.end(self.watch.watched())
        with self.shipping:
            self._ship(last=True)
        if self.shipper.done():
            shutil.rmtree(self.folder, ignore_errors=True)
        with self.lock:
            return Stopped(self.job, self.attempt, self.node, tuple(left), tuple(self.unsaid))

    def wait_end(self) -> None:
        """Never answers: the call breaks when this agent or its node is gone, and so tells who waits."""
        threading.Event().wait()

    def standing(self, epoch: int) -> Standing:
        """How the ranks of this node are; tells a returning controller that there is somebody to adopt."""
        self._obey(epoch)
        watched = set(self.watch.watched())
        with self.lock:
            alive = {rank: pid for rank, pid in self.pids.items() if pid in watched and rank in self.at_work}
            return Standing(self.attempt, alive, tuple(self.ended.values()), tuple(self.shards))

    # What ranks say

    def enlist(self, rank: int, pid: int) -> None:
        """A rank's process is born: from here on its death is noticed, and `stop` ends it. Too late once stopped."""
        with self.lock:
            if self.stopping:
                raise ClusterError(f"attempt {self.attempt} of job {self.job} has been stopped")
            self.pids[rank] = pid
        if not self.watch.add(pid):
            self._say(RankDied(rank, time.time()))

    @ray.method(concurrency_group="tell")  # type: ignore[untyped-decorator]  # one thread: order stays
    def tell(self, attempt: int, report: Report) -> None:
        if attempt != self.attempt:
            return
        with self.lock:
            if isinstance(report, Failed | Finished):
                self.ended[report.rank] = report
            if isinstance(report, ShardSaved):
                self.shards = [*self.shards, report][-KEPT_SHARDS:]
        self._say(report, now=isinstance(report, Failed | Finished))

    # Passing it on

    def _say(self, what: Any, now: bool = True) -> None:
        with self.lock:
            if isinstance(what, Moved | SnapshotTaken):  # only the newest of a rank counts
                self.unsaid = [
                    (n, old) for n, old in self.unsaid if not (type(old) is type(what) and old.rank == what.rank)
                ]
            self.number += 1
            self.unsaid.append((self.number, what))
        if now:
            self.wake.set()

    def _report(self) -> None:
        while True:
            self.wake.wait(REPORT_S)
            self.wake.clear()
            with self.lock:
                batch = list(self.unsaid)
            if batch and (done := self._deliver(batch)) is not None:
                with self.lock:
                    self.unsaid = [(n, what) for n, what in self.unsaid if n > done]

    def _deliver(self, batch: list[Said]) -> int | None:
        """The number up to which the controller has committed; None while it can't be reached."""
        try:
            controller = ray.get_actor(self.controller, namespace=self.namespace)
            return int(ray.get(controller.hear.remote(self.job, self.attempt, self.node, batch), timeout=10))
        except (ray.exceptions.RayError, ValueError):
            return None  # told again in a second

    def _ship_logs(self) -> None:
        """A thread of its own: storage that is slow delays no report."""
        while True:
            time.sleep(REPORT_S)
            with self.shipping:
                self._ship()

    def _ship(self, last: bool = False) -> None:
        with contextlib.suppress(OSError):  # storage is away: the lines stay on the node and are shipped later
            for chunk in self.shipper.ship(last):
                self._say(chunk, now=False)

    def _notice_deaths(self) -> None:
        while True:
            for pid in self.watch.ended(0.2):
                rank = next(rank for rank, known in self.pids.items() if known == pid)
                if not self.stopping and not isinstance(self.ended.get(rank), Finished):
                    self._say(RankDied(rank, time.time()))

    def _obey(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise Fenced(f"epoch {epoch} is older than {self.epoch}: another controller leads job {self.job}")
        self.epoch = epoch


NodeAgentActor = ray.remote(max_restarts=0, max_concurrency=16, concurrency_groups={"tell": 1})(NodeAgent)
