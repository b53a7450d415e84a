"""The memory tier on a node: one actor a node and job keeps the snapshots of the node's ranks and those of its peers,
copies each to its peer, and serves both by range. It outlives attempts, and ends with the job.

All it knows is in files, in the node's memory: beside each shard a record of what its rank said of it. Knows no layout,
and nothing of when a snapshot is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import shutil
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import ray

from service.contracts.errors import Fenced
from service.runtime import courier
from workers.checkpoint import manifest
from workers.checkpoint.storage import Storage
from workers.reports import ShardSaved

GENERATIONS = 2
RECORD = ".record"
SNAPSHOTS = "{job}/{node}/snapshots"  # name of the actor
BESIDE = "peer"  # folder for what arrives
LOCK = ".lock"
YOUNG_S = 10.0  # a folder that may be about to get its keeper


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """One rank's shard of a snapshot, on one node."""

    node: str
    world: int
    record: ShardSaved

    @property
    def folder(self) -> str:
        return self.record.index.rpartition("/")[0]


class Snapshots:
    def __init__(self, epoch: int, job: str, node: str, root: str, limit: int, host: str = "127.0.0.1") -> None:
        self.epoch, self.job, self.node = epoch, job, node
        self.folder = Path(root) / node / job
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = (self.folder / LOCK).open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)  # for as long as this process lives
        self.storage = Storage.open(str(self.folder))
        self.limit = limit or shutil.disk_usage(self.folder).free // 2
        self.admitted: dict[tuple[str, int], int] = {}  # (owner, rank) -> bytes of one generation
        self.peer: Any = None
        self.way: courier.Door | None = None  # to the peer
        self.pruning = threading.Lock()
        self.porter = courier.Porter(host, self.folder / BESIDE, self._taken)

    # Orders

    def begin(self, epoch: int, peer: Any, keep: Sequence[str]) -> None:
        """A new attempt: its peer, and the generations (folders) that are whole; all others go."""
        self._obey(epoch)
        self.peer, self.way = peer, None
        self.admitted = {}
        for folder in self._generations():
            if folder not in keep:
                self.storage.delete(folder)
        self.storage.delete(manifest.MANIFESTS)

    def publish(self, path: str, data: bytes) -> None:
        """Put a manifest where the node's ranks read it."""
        self.storage.create(path, data)

    def end(self, epoch: int) -> None:
        """Forget everything."""
        self._obey(epoch)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Take nothing in any more; what is kept is left behind."""
        self.porter.close()
        self.lock.close()

    # What ranks ask

    def admit(self, rank: int, nbytes: int) -> str:
        """Why two generations of the rank's part can't be kept here and at the peer; empty where they can."""
        if refusal := str(self.reserve(self.node, rank, nbytes)):
            return refusal
        with contextlib.suppress(ray.exceptions.RayError):  # a peer that is gone refuses nothing
            return str(ray.get(self.peer.reserve.remote(self.node, rank, nbytes))) if self.peer is not None else ""
        return ""

    @ray.method(concurrency_group="take")  # type: ignore[untyped-decorator]
    def reserve(self, owner: str, rank: int, nbytes: int) -> str:
        others = sum(size for key, size in self.admitted.items() if key != (owner, rank))
        if (need := GENERATIONS * (others + nbytes)) > self.limit:
            return f"snapshots need {_size(need)} of memory on {self.node}, which gives them {_size(self.limit)}"
        self.admitted[owner, rank] = nbytes
        return ""

    @ray.method(concurrency_group="hold")  # type: ignore[untyped-decorator]
    def hold(self, world: int, record: ShardSaved) -> None:
        """Keep a shard that its rank has written here, and copy it to the peer. OSError: the peer has none."""
        self._keep(world, record)
        try:
            if self.peer is not None:
                self._push(world, record)
        except (ray.exceptions.RayError, OSError) as error:
            raise OSError(f"the peer of {self.node} did not take it: {type(error).__name__}") from error

    # What peers ask

    @ray.method(concurrency_group="take")  # type: ignore[untyped-decorator]
    def door(self) -> courier.Door:
        """Where shards of others come in."""
        return self.porter.door

    # What readers ask

    @ray.method(concurrency_group="read")  # type: ignore[untyped-decorator]
    def read(self, path: str, start: int | None, end: int | None) -> bytes:
        return self.storage.read(path, start, end)

    @ray.method(concurrency_group="read")  # type: ignore[untyped-decorator]
    def size(self, path: str) -> int:
        return self.storage.size(path)

    @ray.method(concurrency_group="read")  # type: ignore[untyped-decorator]
    def kept(self) -> list[Kept]:
        """Every shard here that is whole."""
        found = []
        for path in self.storage.names(manifest.FOLDERS):
            if path.endswith(RECORD):
                with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # cut short, or just removed
                    value = json.loads(self.storage.read(path))
                    found.append(Kept(self.node, value.pop("world"), ShardSaved(**value)))
        return found

    def _push(self, world: int, record: ShardSaved) -> None:
        if self.way is None:
            self.way = ray.get(self.peer.door.remote(), timeout=courier.SILENT_S)
        files = {path: self.folder / path for path in (_data(record), record.index)}
        courier.send(self.way, files, {"world": world, **dataclasses.asdict(record)})

    def _taken(self, note: courier.Note) -> None:
        """All of a shard has come from a peer: it is one of ours from here on."""
        world, record = note.pop("world"), ShardSaved(**note)
        for path in (_data(record), record.index):
            final = self.folder / path
            final.parent.mkdir(parents=True, exist_ok=True)
            (self.folder / BESIDE / path).replace(final)
        self._keep(world, record)

    def _keep(self, world: int, record: ShardSaved) -> None:
        """Its record makes a shard whole; the generation before the last goes."""
        told = json.dumps({"world": world, **dataclasses.asdict(record)}).encode()
        path = record.index.removesuffix(".json") + RECORD
        self.storage.delete(path)
        self.storage.create(path, told)
        with self.pruning:
            for folder in self._generations()[GENERATIONS:]:
                self.storage.delete(folder)

    def _generations(self) -> list[str]:
        """Folders, the newest first."""
        folders = {path.rpartition("/")[0] for path in self.storage.names(manifest.FOLDERS)}
        return sorted(folders, key=manifest.generation, reverse=True)

    def _obey(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise Fenced(f"epoch {epoch} is older than {self.epoch}: another controller leads job {self.job}")
        self.epoch = epoch


def clear(root: str, node: str, alive: Collection[str]) -> list[str]:
    """Remove what keepers of jobs that are over have left on this node. Those of which something stays: somebody is
    still there; or nobody is, and the job is alive: it may need it, and may end without coming back."""
    stays = []
    for folder in sorted(Path(root, node).glob("*")):
        left = _left(folder)
        if left and folder.name not in alive:
            shutil.rmtree(folder, ignore_errors=True)
        elif left or folder.name not in alive:
            stays.append(folder.name)
    return stays


def _left(folder: Path) -> bool:
    """Whether the keeper of a folder is gone."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return not folder.exists() or time.time() - folder.stat().st_mtime > YOUNG_S


SnapshotsActor = ray.remote(
    num_cpus=0, max_restarts=0, max_concurrency=8, concurrency_groups={"hold": 16, "take": 16, "read": 16}
)(Snapshots)


def _data(record: ShardSaved) -> str:
    return record.index.removesuffix(".json") + ".bin"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.1f} MiB"
