"""One actor a node and job: holds the node's devices, has processes stand by on its slots and makes ranks of them,
notices their deaths, ends them, gathers what they say and passes it on to the controller, ships their logs.

It outlives attempts, and the controller: what the controller has not confirmed is kept and told again. Orders carry the
epoch of the controller's lease; one from an older epoch is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from service import health_policy
from service.contracts.errors import ClusterError, Fenced
from service.contracts.events import HealthFound
from service.contracts.runtime import Runtime
from service.runtime import care, logs, stacks
from service.runtime.crew import Crew, Member
from service.runtime.health import monitor
from service.runtime.health.monitor import Monitor
from service.runtime.outbox import Outbox, Said
from service.runtime.rank import RankActor
from service.runtime.redaction import Redaction
from service.runtime.shelf import Place
from service.runtime.stacks import Look
from workers.checkpoint.storage import Storage
from workers.reports import Failed, Finished, Paused, Report, Resumed, ShardSaved, StepDone
from workers.spec import Assignment, RunSpec

REPORT_S = 1.0
KEPT_SHARDS = 64
Ended = Finished | Paused | Failed
Standby = tuple[RunSpec, int]  # the rank of a run that a process gets ready to be


@dataclasses.dataclass(frozen=True, slots=True)
class RankDied:
    """A rank's process is gone and had not finished."""

    rank: int
    at: float
    out_of_memory: bool = False  # the kernel ended it for that
    used: int | None = None  # bytes that it had then, where that is known


@dataclasses.dataclass(frozen=True, slots=True)
class Warm:
    """On so many slots of this node somebody stands by, as warm as it gets."""

    node: str
    slots: int


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """What an agent answers to a controller that comes back."""

    attempt: int
    pids: dict[int, int]  # rank -> pid, of those alive and at work
    ended: tuple[Ended, ...]
    shards: tuple[ShardSaved, ...]  # the newest ones


@dataclasses.dataclass(frozen=True, slots=True)
class Stopped:
    """What an agent answers to the order to stop."""

    job: str
    attempt: int
    node: str
    left: tuple[int, ...]  # pids that would not go
    unsaid: tuple[Said, ...]  # what the controller has not confirmed


class Turn:
    """One attempt on this node."""

    def __init__(self, attempt: int, shipper: logs.Shipper) -> None:
        self.attempt, self.shipper = attempt, shipper
        self.ended: dict[int, Ended] = {}
        self.shards: list[ShardSaved] = []
        self.over = False  # it was told to stop


class NodeAgent:
    def __init__(
        self,
        epoch: int,
        job: str,
        node: str,
        slots: Sequence[int],
        controller: str,
        namespace: str,
        root: str,
        scratch: str,
        kernel_log: str,
        runtime: Runtime,
    ) -> None:
        self.runtime, self.redaction = runtime, Redaction()
        self.epoch, self.job, self.node, self.slots = epoch, job, node, tuple(slots)
        self.controller, self.namespace = controller, namespace
        self.storage = Storage.open(root).child(job)
        self.scratch = Path(scratch)
        self.lock = threading.Lock()
        self.beginning = threading.Lock()
        self.shipping = threading.Lock()
        self.serials = itertools.count(1)
        self.born: dict[int, Any] = {}  # slot -> a process that is on its way to it
        self.warm: set[int] = set()  # pids
        self.outbox = Outbox()
        self.shippers: list[logs.Shipper] = []  # of this attempt, and of earlier ones with something left
        self.turn = Turn(0, self._shipper(0))
        self.rendezvous: Any = None
        sources = monitor.sources(node, Path(kernel_log.replace("{node}", node)))
        self.health = Monitor(health_policy.read(), sources, self._found)
        self.crew = Crew(self._lost, self.health.holders)
        self.health.start()
        for work in (self._report, self._ship_logs, self._look):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    # Orders

    def begin(self, epoch: int, attempt: int, slots: Sequence[int]) -> bool:
        """A new attempt: of an earlier one nobody is at work any more. Whether this agent holds its slots.

        Orders may overtake each other, on a node that was slow to have its agent: the newest attempt stays.
        """
        self._obey(epoch)
        if not set(slots) <= set(self.slots):
            return False
        with self.beginning:
            if attempt < self.turn.attempt:
                return True
            if left := self.crew.end(everyone=False):
                raise ClusterError(f"processes {left} of an earlier attempt did not end by SIGKILL")
            with self.lock:
                self.turn = Turn(attempt, self._shipper(attempt))
            with self.shipping:
                self.shippers.append(self.turn.shipper)
        self._tell_standbys()
        return True

    def probe(self, epoch: int) -> str:
        """What a probe of the devices that this agent holds found; empty: nothing."""
        self._obey(epoch)
        return care.probe(tuple(range(len(ray.get_gpu_ids()))))

    def muster(self, epoch: int, slots: Sequence[int]) -> None:
        """Returns once somebody stands by on each of these slots."""
        self._obey(epoch)
        for slot, ready in [(slot, self._come(slot).ready.remote()) for slot in slots]:
            try:
                ray.get(ready)
            except ray.exceptions.ActorDiedError:  # it may have died while nobody needed it
                with self.lock:
                    self.born.pop(slot, None)
                ray.get(self._come(slot).ready.remote())

    def stand_by(self, epoch: int, wanted: Mapping[int, Standby]) -> None:
        """Somebody is to stand by on each of these slots, warm. Does not wait for that."""
        self._obey(epoch)
        for slot, standby in wanted.items():
            self._come(slot, aside=True).warm.remote(*standby)

    def host_store(self, epoch: int, address: str) -> tuple[str, int]:
        """Open the rendezvous store on this node, outside the ranks. (IP literal, port)."""
        self._obey(epoch)
        from torch.distributed import TCPStore

        self.rendezvous = TCPStore(address, 0, None, True, wait_for_workers=False)
        return address, self.rendezvous.port

    def start(self, epoch: int, members: Mapping[int, Assignment], memory: Place | None) -> None:
        """Give each of these slots its assignment, and say where snapshots are."""
        self._obey(epoch)
        gpus = ray.get_gpu_ids()
        devices = ",".join(str(gpu) for gpu in gpus) if gpus else None
        folders = (str(self.turn.shipper.folder), str(self.scratch / "kept"))
        taken = []
        for slot, assignment in members.items():
            member = self.crew.standby(slot)
            if member is None:
                raise ClusterError(f"the process that stood by on slot {slot} of {self.node} is gone")
            self.crew.put(member.pid, assignment.rank)
            own = dataclasses.replace(assignment, local_index=self.slots.index(slot))
            self.warm.discard(member.pid)
            taken.append(member.actor.assign.remote(own, *folders, devices, memory))
        ray.get(taken)
        self._tell_standbys()

    def pause(self, epoch: int, durable: bool) -> None:
        """Every rank of this node is to end after the step under way; `durable`: with its state in storage."""
        self._obey(epoch)
        for member in self.crew.at_work().values():
            member.actor.pause.remote(durable)

    def save(self, epoch: int) -> None:
        """Every rank of this node is to write the step under way to storage."""
        self._obey(epoch)
        for member in self.crew.at_work().values():
            member.actor.save.remote()

    def inspect(self, epoch: int) -> list[Look]:
        """Where every rank of this node stands."""
        self._obey(epoch)
        folder = self.turn.shipper.folder
        found = sorted(self.crew.at_work().items())
        with ThreadPoolExecutor(len(found) or 1) as pool:
            asked = [
                pool.submit(stacks.look, rank, self.node, member.pid, folder / f"{rank}.stack")
                for rank, member in found
            ]
            return [one.result() for one in asked]

    def stop(self, epoch: int, keep: bool = False) -> Stopped:
        """End every rank of this node; without `keep` the standbys too, for good, and ship the rest of their logs."""
        self._obey(epoch)
        turn = self.turn
        turn.over = True
        left = self.crew.end(everyone=not keep)
        if not keep:
            with self.shipping:
                self._ship(last=True)
        return Stopped(self.job, turn.attempt, self.node, tuple(left), self.outbox.of(turn.attempt))

    def wait_end(self) -> None:
        """Never answers: the call breaks when this agent or its node is gone, and so tells who waits."""
        threading.Event().wait()

    def standing(self, epoch: int) -> Standing:
        """How the ranks of this node are; tells a returning controller that there is somebody to adopt."""
        self._obey(epoch)
        alive = {rank: member.pid for rank, member in self.crew.at_work().items()}
        with self.lock:
            turn = self.turn
            return Standing(turn.attempt, alive, tuple(turn.ended.values()), tuple(turn.shards))

    # What ranks say

    def enlist(self, slot: int, pid: int, actor: Any) -> None:
        """A process is born: from here on its death is noticed, and `stop` ends it. Too late once stopped."""
        self.crew.enlist(slot, pid, actor)
        with self.lock:
            self.born.pop(slot, None)

    def warmed(self, pid: int) -> None:
        """It has got ready as far as it can."""
        self.warm.add(pid)
        self._tell_standbys()

    @ray.method(concurrency_group="tell")  # type: ignore[untyped-decorator]  # one thread: order stays
    def tell(self, attempt: int, report: Report) -> None:
        turn = self.turn
        if attempt != turn.attempt:
            return
        with self.lock:
            if isinstance(report, Ended):
                turn.ended[report.rank] = report
            if isinstance(report, ShardSaved):
                turn.shards = [*turn.shards, report][-KEPT_SHARDS:]
        self.outbox.say(attempt, report, now=isinstance(report, Ended | Resumed))

    # Passing it on

    def _come(self, slot: int, aside: bool = False) -> Any:
        """Who stands by on this slot, or is on its way there: `aside`, where others are at work meanwhile."""
        if (member := self.crew.standby(slot)) is not None:
            return member.actor
        with self.lock:
            if slot not in self.born:
                group = ray.util.get_current_placement_group()
                self.born[slot] = RankActor.options(
                    name=f"{self.job}/{self.node}/{slot}/{self.turn.attempt}.{next(self.serials)}",
                    namespace=self.namespace, lifetime="detached",
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
                ).remote(
                    slot, ray.get_runtime_context().current_actor, aside, self.runtime, str(self.scratch)
                )  # fmt: skip
                self.redaction.look_up(self.runtime.secrets)  # as they are now, which is what it will find
            return self.born[slot]

    def _found(self, event: HealthFound) -> None:
        self.outbox.say(self.turn.attempt, event)

    def _tell_standbys(self) -> None:
        found = [self.crew.standby(slot) for slot in self.slots]
        warm = sum(member is not None and member.pid in self.warm for member in found)
        self.outbox.say(self.turn.attempt, Warm(self.node, warm), now=False)

    def _lost(self, member: Member) -> None:
        turn = self.turn
        self.warm.discard(member.pid)
        if member.rank is not None and not turn.over and not isinstance(turn.ended.get(member.rank), Finished | Paused):
            kill = self.health.out_of_memory(member.pid)
            used = kill.anon_rss if kill is not None else None
            self.outbox.say(turn.attempt, RankDied(member.rank, time.time(), kill is not None, used))
        if member.rank is None:
            self._tell_standbys()

    def _report(self) -> None:
        while True:
            self.outbox.wake.wait(REPORT_S)
            self.outbox.wake.clear()
            for attempt, said in self.outbox.waiting():
                if (done := self._deliver(attempt, said)) is None:
                    break
                self.outbox.confirm(attempt, done)
                self._heard([what.step for number, what in said if number <= done and isinstance(what, StepDone)])

    def _heard(self, steps: Sequence[int]) -> None:
        """The controller knows of these: rank 0, which told them, need not remember them."""
        leader = self.crew.at_work().get(0)
        if steps and leader is not None:
            leader.actor.heard.remote(max(steps))

    def _deliver(self, attempt: int, said: list[Said]) -> int | None:
        """The number up to which the controller has committed; None while it can't be reached."""
        try:
            controller = ray.get_actor(self.controller, namespace=self.namespace)
            return int(ray.get(controller.hear.remote(self.job, attempt, self.node, said), timeout=10))
        except (ray.exceptions.RayError, ValueError):
            return None  # told again in a second

    def _shipper(self, attempt: int) -> logs.Shipper:
        folder = self.scratch / self.job / f"{attempt:06d}-{self.node}"
        return logs.Shipper(folder, self.storage, attempt, self.node, redact=self.redaction.text)

    def _ship_logs(self) -> None:
        """A thread of its own: storage that is slow delays no report."""
        while True:
            time.sleep(REPORT_S)
            with self.shipping:
                self._ship()

    def _ship(self, last: bool = False) -> None:
        """Those of attempts that are over to their end, and then no more."""
        with contextlib.suppress(OSError):  # storage is away: the lines stay on the node and are shipped later
            for shipper in tuple(self.shippers):
                over = last or shipper is not self.turn.shipper
                for chunk in shipper.ship(over):
                    self.outbox.say(shipper.attempt, chunk, now=False)
                if over and shipper.done():
                    self.shippers.remove(shipper)
                    shutil.rmtree(shipper.folder, ignore_errors=True)

    def _look(self) -> None:
        while True:
            self.crew.look(0.2)

    def _obey(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise Fenced(f"epoch {epoch} is older than {self.epoch}: another controller leads job {self.job}")
        self.epoch = epoch


NodeAgentActor = ray.remote(max_restarts=0, max_concurrency=16, concurrency_groups={"tell": 1})(NodeAgent)
