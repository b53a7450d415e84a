"""Faults by name, as small objects: whether a fault may come now, how it strikes, and how it ends.

They know the fleet and one job on it; nothing of what the service makes of them. Each is struck and undone by one
object, which remembers what it hit.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import random
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from service.contracts.job import Phase
from service.contracts.status import JobView
from tests.chaos import net
from tests.chaos.fleet import Fleet, Process

RANK = "ray::Rank"


@dataclasses.dataclass
class Fault(abc.ABC):
    """`holds`: seconds between strike and undo, from and to."""

    name: ClassVar[str]
    holds: ClassVar[tuple[float, float]] = (0.0, 0.0)

    def wants(self, fleet: Fleet, job: JobView) -> bool:
        """Whether it can come now, and the job can go on after it."""
        return job.phase is Phase.RUNNING

    @abc.abstractmethod
    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        """Break it; what was broken, in a few words."""

    def undo(self, fleet: Fleet) -> None:  # noqa: B027  # most have nothing to undo
        """What comes back does so."""


def hosts_of(job: JobView) -> list[str]:
    return sorted({place.node for place in job.status.placement})


def ranks(fleet: Fleet, job: JobView) -> list[Process]:
    """At work on the job's hosts."""
    return [one for host in hosts_of(job) for one in fleet.processes(RANK, host)]


@contextlib.contextmanager
def slowed(processes: Sequence[Process]) -> Iterator[None]:
    """They work for a twentieth of each second: how far a job gets depends on no machine's speed."""
    over = threading.Event()

    def hold() -> None:
        while not over.wait(0.05):
            for process in processes:
                _signal(process, signal.SIGSTOP)
            over.wait(0.95)
            for process in processes:
                _signal(process, signal.SIGCONT)

    holder = threading.Thread(target=hold, name="slowed")
    holder.start()
    try:
        yield
    finally:
        over.set()
        holder.join()


def room_without(fleet: Fleet, job: JobView, lost: set[str]) -> bool:
    """Whether the hosts that are left have slots enough for the job."""
    return len(fleet.up - lost) * fleet.slots >= len(job.status.placement)


class KillRank(Fault):
    name = "kill_rank"

    def wants(self, fleet: Fleet, job: JobView) -> bool:
        return super().wants(fleet, job) and bool(ranks(fleet, job))

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        return _signal(rng.choice(ranks(fleet, job)), signal.SIGKILL)


class StopRank(Fault):
    """Frozen for a moment: nothing need be lost."""

    name = "stop_rank"
    holds = (1.0, 5.0)
    hit: Process | None = None

    def wants(self, fleet: Fleet, job: JobView) -> bool:
        return super().wants(fleet, job) and bool(ranks(fleet, job))

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        self.hit = rng.choice(ranks(fleet, job))
        return _signal(self.hit, signal.SIGSTOP)

    def undo(self, fleet: Fleet) -> None:
        if self.hit is not None:
            _signal(self.hit, signal.SIGCONT)


class HangRank(StopRank):
    """Frozen for longer than the fleet's limits allow: it has to be found, and ended."""

    name = "hang_rank"
    holds = (20.0, 25.0)


class KillNode(Fault):
    """A host of the job loses power, and comes back once the job has had its time without it."""

    name = "kill_node"
    holds = (0.0, 8.0)
    hit: str = ""

    def wants(self, fleet: Fleet, job: JobView) -> bool:
        return super().wants(fleet, job) and room_without(fleet, job, set(hosts_of(job)[:1]))

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        self.hit = rng.choice(hosts_of(job))
        fleet.lose(self.hit)
        return self.hit

    def undo(self, fleet: Fleet) -> None:
        fleet.join(self.hit)


class KillController(Fault):
    name = "kill_controller"

    def wants(self, fleet: Fleet, job: JobView) -> bool:
        return bool(fleet.processes("ray::Controller"))

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        return _signal(fleet.processes("ray::Controller")[0], signal.SIGKILL)


class KillApi(Fault):
    name = "kill_api"
    child: ClassVar[str] = "api"

    def wants(self, fleet: Fleet, job: JobView) -> bool:
        return fleet.keeper.pid(self.child) is not None

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        pid = fleet.keeper.pid(self.child)
        assert pid is not None
        return _signal(Process("head", pid, self.child), signal.SIGKILL)


class KillKeeper(KillApi):
    """Who makes controllers."""

    name = "kill_keeper"
    child = "service"


class KillHead(Fault):
    """It comes back with what Redis has."""

    name = "kill_head"
    holds = (0.0, 5.0)

    def wants(self, fleet: Fleet, job: JobView) -> bool:
        return super().wants(fleet, job) and fleet.redis

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        fleet.lose_head()
        return "head"

    def undo(self, fleet: Fleet) -> None:
        fleet.start_head()


class CutHost(Fault):
    """For a moment, or for so long that it is given up."""

    name = "cut_host"
    holds = (0.5, 12.0)
    hit: str = ""

    def wants(self, fleet: Fleet, job: JobView) -> bool:
        return super().wants(fleet, job) and room_without(fleet, job, set(hosts_of(job)[:1]))

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        self.hit = rng.choice(hosts_of(job))
        fleet.net.cut(self.hit)
        return self.hit

    def undo(self, fleet: Fleet) -> None:
        fleet.net.heal(self.hit)


class Partition(Fault):
    """One rack reaches nobody else."""

    name = "partition"
    holds = (0.5, 12.0)
    hit: str = ""

    def wants(self, fleet: Fleet, job: JobView) -> bool:
        return super().wants(fleet, job) and bool(self._cuttable(fleet, job))

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        self.hit = rng.choice(self._cuttable(fleet, job))
        fleet.net.partition(self.hit)
        return self.hit

    def undo(self, fleet: Fleet) -> None:
        fleet.net.rejoin(self.hit)

    def _cuttable(self, fleet: Fleet, job: JobView) -> list[str]:
        return [rack for rack, hosts in fleet.racks.items() if room_without(fleet, job, set(hosts))]


class SlowHost(Fault):
    name = "slow_host"
    holds = (2.0, 6.0)
    mbit: ClassVar[float] = 8.0
    hit: str = ""

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        self.hit = rng.choice(hosts_of(job))
        self._shape(fleet)
        return self.hit

    def undo(self, fleet: Fleet) -> None:
        fleet.net.even(self.hit)

    def _shape(self, fleet: Fleet) -> None:
        fleet.net.slow(self.hit, self.mbit)


class FarHost(SlowHost):
    """Every packet takes longer, where the kernel can do that."""

    name = "far_host"

    def wants(self, fleet: Fleet, job: JobView) -> bool:
        return super().wants(fleet, job) and net.can_delay()

    def _shape(self, fleet: Fleet) -> None:
        fleet.net.delay(self.hit, 20)


class FullDisk(Fault):
    """Not a byte of storage is left."""

    name = "full_disk"
    holds = (2.0, 6.0)
    FILE = ".filled"

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        with (fleet.storage / self.FILE).open("wb", buffering=0) as out, contextlib.suppress(OSError):
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while out.write(bytes(size)) == size:
                        pass
        return str(fleet.storage)

    def undo(self, fleet: Fleet) -> None:
        (fleet.storage / self.FILE).unlink()


class StorageReadOnly(Fault):
    """Storage is read as before, and refuses every write."""

    name = "storage_read_only"
    holds = (2.0, 8.0)

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        where = str(fleet.storage)
        _mount("--bind", where, where)
        _mount("-o", "remount,bind,ro", where)
        return where

    def undo(self, fleet: Fleet) -> None:
        subprocess.run(("umount", "-l", str(fleet.storage)), check=True)


class StorageAway(StorageReadOnly):
    """Another, empty file system is where storage was: a mount that is lost."""

    name = "storage_away"

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        _mount("-t", "tmpfs", "-o", "ro,size=4k", f"{fleet.net.prefix}-away", str(fleet.storage))
        return str(fleet.storage)


class StoreLocked(Fault):
    """Another transaction has the store for itself."""

    name = "store_locked"
    holds = (2.0, 8.0)
    held: sqlite3.Connection | None = None

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        self.held = sqlite3.connect(fleet.home / "store.sqlite3", timeout=30, isolation_level=None)
        self.held.execute("BEGIN EXCLUSIVE")
        return "store.sqlite3"

    def undo(self, fleet: Fleet) -> None:
        assert self.held is not None
        self.held.execute("ROLLBACK")
        self.held.close()


class MemoryLost(Fault):
    """The snapshots of one host are gone, and then a rank: its state has to come from elsewhere."""

    name = "memory_lost"

    def wants(self, fleet: Fleet, job: JobView) -> bool:
        return super().wants(fleet, job) and bool(ranks(fleet, job))

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        host = rng.choice(hosts_of(job))
        fleet.lose_memory(host)
        _signal(rng.choice(fleet.processes(RANK, host) or ranks(fleet, job)), signal.SIGKILL)
        return host


class DeviceFault(Fault):
    """The driver logs an error of a device that is over with the processes on it."""

    name = "device_fault"
    XID = 94

    def strike(self, fleet: Fleet, job: JobView, rng: random.Random) -> str:
        host = rng.choice(hosts_of(job))
        fleet.kernels[host].xid(0, self.XID)
        return f"Xid {self.XID} on {host}"


KINDS: dict[str, Callable[[], Fault]] = {
    kind.name: kind
    for kind in (
        KillRank, StopRank, HangRank, KillNode, KillController, KillApi, KillKeeper, KillHead, CutHost, Partition,
        SlowHost, FarHost, FullDisk, StorageReadOnly, StorageAway, StoreLocked, MemoryLost, DeviceFault,
    )
}  # fmt: skip


def _signal(process: Process, number: signal.Signals) -> str:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
    return f"{process.title} (pid {process.pid}) on {process.host}"


def _mount(*arguments: str) -> None:
    subprocess.run(("mount", *arguments), check=True, capture_output=True, text=True)
