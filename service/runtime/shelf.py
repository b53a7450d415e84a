"""The memory tier as a rank reaches it: files of its own node, and through the keepers those of other nodes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from service.runtime.snapshots import SNAPSHOTS, Kept
from workers.checkpoint.storage import LocalStorage, Storage
from workers.reports import ShardSaved

HOLD_S = 300.0
READ_S = 60.0
PINNED = "pinned"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """What a rank is told of the memory tier."""

    root: str  # of all snapshots, in the node's memory
    job: str
    node: str
    namespace: str
    manifests: tuple[str, ...] = ()  # of whole generations, newest first; the files are on every node of the gang
    nodes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # shard without suffix -> its nodes


class Shelf:
    """`workers.checkpoint.memory.Memory` on this node."""

    def __init__(self, place: Place, rank: int, world: int) -> None:
        self.node, self.rank, self.world = place.node, rank, world
        self.manifests = place.manifests
        self.folder = Path(place.root) / place.node / place.job
        self.elsewhere = Elsewhere(place.job, place.namespace, place.nodes)
        self.storage = Reach.of(self.folder, self.elsewhere)

    def admit(self, nbytes: int) -> str:
        with self._keeper() as keeper:
            return str(ray.get(keeper.admit.remote(self.rank, nbytes), timeout=HOLD_S))

    def hold(self, record: ShardSaved) -> None:
        with self._keeper() as keeper:
            ray.get(keeper.hold.remote(self.world, record), timeout=HOLD_S)

    @contextlib.contextmanager
    def _keeper(self) -> Iterator[Any]:
        """OSError for all that goes wrong there."""
        try:
            yield self.elsewhere.keeper(self.node)
        except ray.exceptions.RayTaskError as error:
            raise OSError(str(error.cause)) from error
        except (ray.exceptions.RayError, ValueError) as error:
            raise OSError(f"nobody keeps snapshots on {self.node}: {type(error).__name__}") from error

    @contextlib.contextmanager
    def pinned(self, record: ShardSaved) -> Iterator[Storage]:
        """A second name for the two files keeps their bytes while newer snapshots come."""
        home = self.folder / PINNED
        stem = record.index.removesuffix(".json")
        names = [home / f"{stem}{suffix}" for suffix in (".bin", ".json")]
        names[0].parent.mkdir(parents=True, exist_ok=True)
        try:
            for name in names:
                name.hardlink_to(self.folder / name.relative_to(home))
            yield Storage.open(str(home))
        finally:
            for name in names:
                name.unlink(missing_ok=True)


class Elsewhere(Storage):
    """Shards on other nodes, to be read."""

    def __init__(self, job: str, namespace: str, nodes: Mapping[str, tuple[str, ...]]) -> None:
        self.job, self.namespace, self.nodes = job, namespace, nodes
        self.uri = f"memory of job {job}"
        self.keepers: dict[str, Any] = {}

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        return bytes(self._ask("read", path, start, end))

    def size(self, path: str) -> int:
        return int(self._ask("size", path))

    def keeper(self, node: str) -> Any:
        """ValueError: it is gone."""
        if node not in self.keepers:
            name = SNAPSHOTS.format(job=self.job, node=node)
            self.keepers[node] = ray.get_actor(name, namespace=self.namespace)
        return self.keepers[node]

    def _ask(self, question: str, path: str, *arguments: Any) -> Any:
        problem: OSError = FileNotFoundError(f"{path} is on no node that is left")
        for node in self.nodes.get(path.rpartition(".")[0], ()):
            try:
                return ray.get(getattr(self.keeper(node), question).remote(path, *arguments), timeout=READ_S)
            except (ray.exceptions.RayError, ValueError) as error:
                problem = OSError(f"{path} can't be read from {node}: {type(error).__name__}")
        raise problem


class Reach(LocalStorage):
    """Writes go to this node; what is not here is read from a node that has it."""

    elsewhere: Elsewhere

    @classmethod
    def of(cls, folder: Path, elsewhere: Elsewhere) -> Reach:
        folder.mkdir(parents=True, exist_ok=True)
        plain = Storage.open(str(folder))
        made = cls(plain.fs, plain.root, plain.uri)
        made.elsewhere = elsewhere
        return made

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return super().read(path, start, end)
        return self.elsewhere.read(path, start, end)

    def read_into(self, path: str, start: int, out: memoryview) -> int:
        with contextlib.suppress(FileNotFoundError):
            return super().read_into(path, start, out)
        return self.elsewhere.read_into(path, start, out)

    def size(self, path: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            return super().size(path)
        return self.elsewhere.size(path)


def nodes_of(kept: list[Kept]) -> dict[str, tuple[str, ...]]:
    """Shard without suffix -> the nodes that have it."""
    found: dict[str, tuple[str, ...]] = {}
    for one in kept:
        stem = one.record.index.removesuffix(".json")
        found[stem] = (*found.get(stem, ()), one.node)
    return found
