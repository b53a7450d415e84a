"""Where a run continues: at the newest snapshot or checkpoint that every rank could load and verify, or at the seed.

What is refused, and why, is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from functools import partial

import torch.distributed as dist

from workers.checkpoint import logical, manifest
from workers.checkpoint.memory import Memory
from workers.checkpoint.storage import Storage
from workers.cursor import Cursor, check_model, check_order
from workers.engine import Engine
from workers.models.pretrained import Pretrained
from workers.reports import CheckpointRefused, Recalled, Report, Resumed, SnapshotRefused
from workers.spec import Assignment


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where a run may continue: a manifest, and the storage of its job."""

    path: str
    storage: Storage
    in_memory: bool = False
    is_origin: bool = False  # of another job: the only way to begin

    @property
    def step(self) -> int:
        return manifest.step_of(self.path)


def sources(assignment: Assignment, storage: Storage, memory: Memory | None) -> list[Source]:
    """In the order in which they are tried: the newest step first, of equals the one in memory; the origin last."""
    kept = [Source(path, memory.storage, in_memory=True) for path in memory.manifests] if memory else []
    found = [*kept, *(Source(path, storage) for path in assignment.resume)]
    found.sort(key=lambda source: -source.step)
    if assignment.origin is not None:
        home, path = assignment.origin
        found.append(Source(path, Storage.open(home), is_origin=True))
    return found


def continued(
    assignment: Assignment,
    storage: Storage,
    build: Callable[[], Engine],
    tell: Callable[[Report], None],
    memory: Memory | None = None,
) -> tuple[Engine, Cursor]:
    """An engine at the newest checkpoint or snapshot that every rank could load and verify, or at the seed."""
    weights, uri = "", base(assignment, storage)  # what was loaded of those that the run begins with

    def made() -> Engine:
        nonlocal weights
        engine = build()
        if uri is not None and assignment.run.model.lora:  # its checkpoints lack them
            weights = _pretrained(uri, engine)
        return engine

    engine, tried = made(), sources(assignment, storage, memory)
    for source in tried:
        document, cursor, problem = _opened(source, assignment)
        doubt = first_problem(problem)  # before anything is loaded: the same source on all ranks, or none
        if document is not None and not doubt:
            with _problems(source, problems := []):
                engine.restore(partial(logical.load, manifest=document, storage=source.storage), document.header)
            doubt = first_problem(f"rank {assignment.rank}: {problems[0]}" if problems else "")
        if doubt and source.is_origin:
            raise ValueError(f"{source.path} in {source.storage.uri}, at which the job begins, is no good: {doubt}")
        if assignment.rank == 0:
            if cursor.recent and not doubt:
                tell(Recalled(tuple(cursor.recent)))
            tell(_verdict(source, cursor.step, doubt))
        if not doubt:
            return engine, cursor
    if tried:  # a refused checkpoint may have filled a part of it; two at once may not fit
        del engine
        gc.collect()
        engine = made()
    if uri is not None and not weights:
        weights = _pretrained(uri, engine)
    if assignment.rank == 0:
        tell(Resumed(0, None, weights or None))
    return engine, Cursor(assignment.attempt)


def base(assignment: Assignment, storage: Storage) -> str | None:
    """The folder whose weights the run begins with; of one that began at another's adapters, the other's."""
    if assignment.weights is not None or not assignment.run.model.lora:
        return assignment.weights
    for source in sources(assignment, storage, None):
        with contextlib.suppress(manifest.BadCheckpoint, FileNotFoundError):
            return manifest.load(source.storage, source.path).header.get("base")
    return None


def _pretrained(uri: str, engine: Engine) -> str:
    """The engine has the weights of a folder; what was loaded. ValueError, the same on all ranks, where some rank can't
    have them."""
    problem, told = "", ""
    try:
        found = Pretrained(uri, engine.run.model, engine.vocabulary)
        engine.begin(found.fill)
        told = str(found.loaded())
    except (ValueError, OSError) as error:
        problem = str(error) or type(error).__name__
    if doubt := first_problem(problem):
        raise ValueError(f"init_from: {doubt}")
    return told


def _opened(source: Source, assignment: Assignment) -> tuple[manifest.Manifest | None, Cursor, str]:
    """The manifest, where it says to continue, and what is wrong with it. ValueError: it is of another run."""
    cursor = Cursor(assignment.attempt)
    with _problems(source, problems := []):
        document = manifest.load(source.storage, source.path)
        cursor = Cursor.resumed(document, assignment.attempt)
        check_model(document, assignment.run)
        check_order(document, assignment.run)
        return document, cursor, ""
    return None, cursor, f"rank {assignment.rank}: {problems[0]}"


@contextlib.contextmanager
def _problems(source: Source, found: list[str]) -> Iterator[None]:
    """Adds what makes the source unfit to `found`. An outage of storage, or another model, condemns no checkpoint."""
    try:
        yield
    except manifest.BadCheckpoint as error:
        found.append(error.reason)
    except OSError as error:
        if not source.in_memory:
            raise
        found.append(str(error))  # what memory has lost, storage has


def _verdict(source: Source, step: int, doubt: str) -> Report:
    if not doubt:
        return Resumed(step, None if source.in_memory else source.path)
    return SnapshotRefused(source.step, doubt) if source.in_memory else CheckpointRefused(source.path, doubt)


def first_problem(mine: str) -> str:
    """The first rank's problem that is not empty, the same on all ranks."""
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return next((problem for problem in everyone if problem), "")
