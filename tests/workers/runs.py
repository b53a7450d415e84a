"""What the pool's processes run: an engine over some steps, or the whole trainer; tensors come back in pieces."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.workers.memory import Shelf
from workers import trainer
from workers.blame import NonFinite
from workers.checkpoint import logical
from workers.checkpoint.retry import Retry
from workers.checkpoint.saver import Saver
from workers.checkpoint.shards import Region
from workers.checkpoint.storage import LocalStorage, Storage
from workers.data.corpus import Corpus
from workers.engine import Engine, Outcome
from workers.parallel import mesh
from workers.reports import Moved, Report
from workers.spec import Assignment, RunSpec
from workers.wishes import Wishes

MODEL = {"layers": 4, "hidden": 32, "heads": 8, "kv_heads": 2, "ffn_hidden": 48, "seq_len": 16}
TRAIN = {"steps": 3, "global_batch": 12, "learning_rate": 1e-2, "precision": "float64", "seed": 5}


def spec(**changes: Any) -> RunSpec:
    """A tiny run in float64; `layout`, `train`, `model` and `checkpoint` change single fields; `data` and
    `eval` are whole."""
    return RunSpec.model_validate({
        "model": MODEL | changes.get("model", {}),
        "data": changes.get("data", {}),
        "train": TRAIN | changes.get("train", {}),
        "parallel": changes.get("layout", {}),
        "checkpoint": changes.get("checkpoint", {}),
        "eval": changes.get("eval"),
    })  # fmt: skip


def steps(store: dist.Store, rank: int, run: RunSpec, count: int) -> dict[str, Any]:
    """Train `count` steps. (loss, gradient norm) of each, and this stage's parameters after them."""
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, "cpu", 60.0) as axes:
        engine = Engine(run, corpus.vocabulary, axes, torch.device("cpu"))
        outcomes = []
        for step in range(count):
            outcome = step_at(engine, corpus, step * run.train.global_batch)
            outcomes.append((outcome.loss, outcome.grad_norm))
        return {"outcomes": outcomes, "tensors": kept(engine.state())}


def step_at(engine: Engine, corpus: Corpus, cursor: int) -> Outcome:
    """A step on this replica's share of the samples from `cursor` on."""
    first, count = engine.share(cursor)
    return engine.step(*corpus.batch(first, count), first, starts=corpus.starts(first, count))


def check(store: dist.Store, rank: int, run: RunSpec) -> dict[str, Any]:
    """Raw gradients of the first step, before clipping; then the figures of three steps and the state after them."""
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, "cpu", 60.0) as axes:
        engine = Engine(run, corpus.vocabulary, axes, torch.device("cpu"))
        begin, count = engine.share(0)
        first = engine.gradient(*corpus.batch(begin, count), begin, starts=corpus.starts(begin, count))
        raw = kept(engine.gradients())
        engine.optimizer.drop()
        outcomes = [step_at(engine, corpus, n * run.train.global_batch) for n in range(3)]
        return {
            "first": (first.loss, first.grad_norm, first.tokens),
            "gradients": raw,
            "outcomes": [(outcome.loss, outcome.grad_norm) for outcome in outcomes],
            "tensors": kept(engine.state()),
        }


def kept(tensors: dict[str, torch.Tensor]) -> list[tuple[Region, bytes]]:
    """The pieces that a checkpoint would keep from this rank: all ranks together have each element once."""
    return [(piece.region, bytes(piece.data())) for piece in logical.pieces(tensors, {})]


def train(
    store: dist.Store,
    rank: int,
    root: str,
    run: RunSpec,
    attempt: int,
    resume: tuple[str, ...],
    memory: str = "",
    snapshots: tuple[str, ...] = (),
    origin: tuple[str, str] | None = None,
    asked: Callable[[list[Report], Wishes], None] = lambda said, wishes: None,
    skip: tuple[int, int] | None = None,
    weights: str | None = None,
) -> list[Report]:
    """The trainer to its end; what it reported. `memory`: the folder that stands for it."""
    said: list[Report] = []
    wishes = Wishes()

    def tell(report: Report) -> None:
        said.append(report)
        asked(said, wishes)

    assignment = Assignment(
        job="run",
        attempt=attempt,
        token="test",
        rank=rank,
        run=run,
        root=root,
        store_host="",
        store_port=0,
        resume=resume,
        origin=origin,
        skip=skip,
        weights=weights,
        timeout_s=60.0,
    )
    shelf = Shelf(Storage.open(memory), snapshots) if memory else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "Loop", Patient)
        trainer.train(assignment, store, tell, shelf, wishes)
    return said


def train_without(store: dist.Store, rank: int, root: str, run: RunSpec, skip: tuple[int, int]) -> list[Report]:
    """As `train`; after the step `skip` says, so many samples are left out."""
    return train(store, rank, root, run, 1, (), skip=skip)


def train_from(store: dist.Store, rank: int, root: str, run: RunSpec, weights: str) -> list[Report]:
    """As `train`, from the weights of a folder."""
    return train(store, rank, root, run, 1, (), weights=weights)


def resume_from(
    store: dist.Store, rank: int, root: str, run: RunSpec, resume: tuple[str, ...], weights: str
) -> list[Report]:
    """As `train` in a second attempt, of a run that began with the weights of a folder."""
    return train(store, rank, root, run, 2, resume, weights=weights)


def refused_from(store: dist.Store, rank: int, root: str, run: RunSpec, weights: str) -> str:
    """What the trainer raised about the weights of a folder."""
    try:
        train_from(store, rank, root, run, weights)
    except ValueError as error:
        return str(error)
    raise AssertionError("training began")


def train_until(
    store: dist.Store, rank: int, root: str, run: RunSpec, step: int, asked: int, memory: str, wish: str = "pause"
) -> list[Report]:
    """As `train`; rank `asked` is told to end after `step`, while it is at work on it: in memory (`pause`), or in
    storage too (`suspend`); or only to `save` it."""

    def ask(said: list[Report], wishes: Wishes) -> None:
        last = said[-1]
        if rank == asked and isinstance(last, Moved) and (last.phase, last.step) == ("step", step - 1):
            if wish == "save":
                wishes.save()
            else:
                wishes.pause(durable=wish == "suspend")

    return train(store, rank, root, run, 1, (), memory, asked=ask)


def train_in_an_outage(store: dist.Store, rank: int, root: str, run: RunSpec) -> list[Report]:
    """Storage refuses the first writes of this rank, for one reason after the other."""
    refusals: list[OSError] = [
        *(ConnectionError("no answer") for _ in range(4)),
        *(PermissionError(errno.EACCES, "ExpiredToken") for _ in range(4)),
        *(OSError(errno.ENOSPC, "No space left on device") for _ in range(4)),
    ]
    write = LocalStorage.create

    def create(self: LocalStorage, path: str, data: bytes) -> None:
        if refusals and path.startswith("checkpoints/"):
            raise refusals.pop(0)
        write(self, path, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "create", create)
        patch.setattr(trainer, "Saver", partial(Saver, retry=Retry(60.0, first_s=0.01, most_s=0.05), patience_s=60.0))
        return train(store, rank, root, run, 1, ())


class Patient(trainer.Loop):
    """Tiny steps on few cores: each waits until the last snapshot is held, so that every one is due that can be."""

    def note(self) -> Any:
        self.saver.wait()
        return super().note()


def non_finite(store: dist.Store, rank: int, root: str, run: RunSpec) -> str:
    """What the trainer raised when its figures were no numbers any more."""
    try:
        train(store, rank, root, run, 1, ())
    except NonFinite as error:
        return str(error)
    raise AssertionError("training ended well")


def merged(results: list[dict[str, Any]], kind: str = "tensors") -> dict[str, np.ndarray]:
    """The whole tensors from the pieces of all ranks."""
    tensors: dict[str, np.ndarray] = {}
    for region, data in (piece for result in results for piece in result[kind]):
        whole = tensors.setdefault(region.tensor, np.full(region.shape, np.nan, region.dtype))
        box = tuple(slice(start, start + size) for start, size in zip(region.offset, region.extent, strict=True))
        whole[box] = np.frombuffer(data, region.dtype).reshape(region.extent)
    return tensors
