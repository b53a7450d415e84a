"""Which checkpoints of a job stay, and the removal of the others. Knows manifests and storage; no torch.

`kept` decides, from what is known of each checkpoint; `Retention` finds that out and does it. A manifest goes before
its shards, so that no published checkpoint ever misses one. Whoever reads a checkpoint for long takes a `hold` of it
first: a file below `holds/`, which ends with the reader or at its time.

Shards that were never published, the rest of failed saves, go

- when they are of an older step than the newest good checkpoints, and a good one was begun after them: a checkpoint
  that is being written is never touched;
- or when nothing was written to them for a day, but not those that were begun last;
- or when the job is over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from workers.checkpoint import manifest
from workers.checkpoint.manifest import BadCheckpoint, Manifest
from workers.checkpoint.storage import Storage

LEAST = 2  # good ones: the newest may turn out bad when it is read in full
ABANDONED_S = 24 * 3600.0
SWEEP_S = 3600.0  # between two looks for what was abandoned
HOLDS = "holds"

_HOLD = re.compile(rf"{HOLDS}/([^/.]+)\.[0-9a-f]+\.json")


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """A published checkpoint. Good: nobody rejected it, and all its shards are there."""

    path: str  # of its manifest
    step: int
    attempt: int
    good: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """The newest `keep` good ones stay, two at least; those whose step is a multiple of `keep_every` for ever."""

    keep: int
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep {self.keep} would remove every checkpoint; at least 1")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every {self.keep_every} is no number of steps; at least 1")


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """Manifests' paths, newest first, each with why."""

    kept: Mapping[str, str]
    gone: Mapping[str, str]


def kept(known: Sequence[Known], policy: Policy, held: Collection[str] = (), best: int | None = None) -> Decision:
    """What stays and what goes. One that is no good isn't counted, and goes when the newest good ones are all newer.
    `best`: step of the best evaluation, which stays."""
    newest_first = sorted(known, key=_age, reverse=True)
    good = [one for one in newest_first if one.good]
    newest = good[: max(policy.keep, LEAST)]
    stays, goes = {}, {}
    for one in newest_first:
        if one in newest:
            stays[one.path] = f"number {newest.index(one) + 1} of the newest {len(newest)} good ones"
        elif one.path in held:
            stays[one.path] = "held by a reader"
        elif not newest or _age(one) > _age(newest[-1]):
            stays[one.path] = f"no good, but not older than the newest {len(newest)} good ones"
        elif one.good and policy.keep_every and one.step % policy.keep_every == 0:
            stays[one.path] = f"step {one.step} is a multiple of {policy.keep_every}"
        elif one.good and one.step == best:
            stays[one.path] = f"step {one.step} has the best evaluation"
        else:
            goes[one.path] = f"{'' if one.good else 'no good and '}older than the newest {len(newest)} good ones"
    return Decision(stays, goes)


def quick_check(storage: Storage, path: str) -> str:
    """Why the checkpoint is no good, without a look at its shards' bytes; empty where nothing is wrong."""
    return _look(storage, path)[1]


@contextlib.contextmanager
def hold(storage: Storage, path: str, seconds: float) -> Iterator[None]:
    """While this lasts, `seconds` at most, the checkpoint is not removed. Take it before the manifest is read: whoever
    could read that finds the shards as well.
    """
    manifest.step_of(path)  # a manifest's path, or ValueError
    name = f"{HOLDS}/{path.rpartition('/')[2].removesuffix('.json')}.{uuid.uuid4().hex}.json"
    storage.create(name, json.dumps({"until": time.time() + seconds}).encode())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # then it ends at its time
            storage.delete(name)


def held(storage: Storage, now: float) -> set[str]:
    """Manifests' paths that are held. Holds whose time is over are removed."""
    found = set()
    for name in storage.names(HOLDS):
        match = _HOLD.fullmatch(name)
        if match is None:
            continue
        with contextlib.suppress(FileNotFoundError):  # it just ended
            if _until(storage.read(name)) > now:
                found.add(f"{manifest.MANIFESTS}/{match[1]}.json")
            else:
                storage.delete(name)
    return found


class Retention:
    """Of one job's storage. It remembers which checkpoints it has found good, and when it last swept: keep it."""

    def __init__(
        self,
        storage: Storage,
        policy: Policy,
        *,
        abandoned_s: float = ABANDONED_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.storage, self.policy, self.abandoned_s, self.clock = storage, policy, abandoned_s, clock
        self._homes: dict[str, str] = {}  # of checkpoints whose shards were all there: the folder they are in
        self._swept_at = float("-inf")

    def apply(
        self, rejected: Collection[str] = (), protect: Collection[str] = (), best: int | None = None
    ) -> list[str]:
        """Remove what need not stay; what was removed. `rejected` are no good; `protect` stays as what is held does;
        the step of the `best` evaluation too."""
        known = self._known(rejected)
        decision = kept(known, self.policy, held(self.storage, self.clock()) | set(protect), best)
        for path in decision.gone:
            self.storage.delete(path)
        sweeping = self.clock() >= self._swept_at + SWEEP_S
        folders = self._folders(known, decision, protect, sweeping)
        for folder in folders:
            self.storage.delete(folder)
        torn = self.storage.sweep("", self.abandoned_s) if sweeping else []
        if sweeping:
            self._swept_at = self.clock()
        for path in decision.gone:
            self._homes.pop(path, None)
        return [*decision.gone, *folders, *torn]

    def finish(self) -> list[str]:
        """Nobody writes or publishes here any more: what is in no manifest goes now; what went."""
        self._known(())
        published = set(manifest.published(self.storage))
        gone = []
        for folder in sorted(self._last_change()):
            path = _manifest_of(folder)
            if path not in published or self._homes.get(path, folder) != folder:
                self.storage.delete(folder)
                gone.append(folder)
        return gone

    def _known(self, rejected: Collection[str]) -> list[Known]:
        paths = manifest.published(self.storage)
        doubted = [path for path in paths if path not in rejected and path not in self._homes]
        with ThreadPoolExecutor(manifest.REQUESTS) as pool:
            for path, (document, why) in zip(doubted, pool.map(lambda p: _look(self.storage, p), doubted), strict=True):
                if document is not None and not why:
                    self._homes[path] = _home(document)
        return [
            Known(path, *manifest.key_of(path), good=path in self._homes and path not in rejected) for path in paths
        ]

    def _folders(
        self, known: Sequence[Known], decision: Decision, protect: Collection[str], sweeping: bool
    ) -> list[str]:
        """Folders of shards to remove: those of the manifests that are gone, and those of none."""
        good = [one for one in known if one.good]
        if not good:
            return []
        oldest_step = sorted(good, key=_age, reverse=True)[: max(self.policy.keep, LEAST)][-1].step
        last_good = max(manifest.generation(self._homes[one.path]) for one in good)
        changed = self._last_change()
        last_begun = max(map(manifest.generation, changed), default=last_good)
        quiet_since = self.clock() - self.abandoned_s

        def goes(folder: str) -> bool:
            generation = manifest.generation(folder)
            path = _manifest_of(folder)
            of_it = self._homes.get(path, folder) == folder
            if of_it and (path in decision.kept or path in decision.gone):
                return path in decision.gone
            if generation[2] < oldest_step and generation < last_good:
                return True
            return sweeping and changed[folder] < quiet_since and generation != last_begun

        found = sorted(filter(goes, changed))
        if not found:
            return []
        # Since the decision somebody may have taken a hold and read a manifest before it went, or published one.
        spared = {*held(self.storage, self.clock()), *protect, *manifest.published(self.storage)}
        return [folder for folder in found if _manifest_of(folder) not in spared - decision.kept.keys()]

    def _last_change(self) -> dict[str, float]:
        """When each folder of shards was last written to."""
        changed: dict[str, float] = {}
        for path, found in self.storage.objects(manifest.FOLDERS).items():
            folder = manifest.folder_of(path)
            if folder is not None:
                changed[folder] = max(found.modified, changed.get(folder, found.modified))
        return changed


def _look(storage: Storage, path: str) -> tuple[Manifest | None, str]:
    """The manifest, where it can be read, and what is wrong with the checkpoint."""
    try:
        document = manifest.load(storage, path)
    except BadCheckpoint as error:
        return None, error.reason
    sizes = storage.sizes(_home(document))
    for shard in document.shards:
        if shard.path not in sizes or shard.index not in sizes:
            return document, f"{shard.path if shard.path not in sizes else shard.index} is missing"
        if sizes[shard.path] != shard.nbytes:
            return document, f"{shard.path} has {sizes[shard.path]} bytes instead of {shard.nbytes}"
    return document, ""


def _home(document: Manifest) -> str:
    return manifest.folder(document.step, document.attempt, document.token)


def _manifest_of(folder: str) -> str:
    attempt, _, step = manifest.generation(folder)
    return manifest.path(step, attempt)


def _age(one: Known) -> tuple[int, int]:
    return one.step, one.attempt


def _until(data: bytes) -> float:
    """When a hold ends; long ago where that can't be read."""
    try:
        return float(json.loads(data)["until"])
    except (KeyError, TypeError, ValueError):
        return float("-inf")
