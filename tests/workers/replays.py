"""What the pool's processes run for replays: engines, and the trainer, of which one rank computes a little wrong."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from tests.workers import runs
from workers.data.corpus import Corpus
from workers.engine import Engine
from workers.parallel import mesh
from workers.replay import Corrupted, Replay
from workers.spec import RunSpec

Way = Literal["forward", "backward"]
LITTLE = 1 + 1e-12


def spoil(engine: Engine, layer: int, way: Way) -> None:
    """From now on the device errs in this layer, where this rank has it."""

    def result(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor | None:
        if way == "forward":
            return out * LITTLE
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * LITTLE)
        return None

    for part in engine.parts:
        blocks = dict(part.get_submodule("layers").named_children())
        if str(layer) in blocks:
            blocks[str(layer)].get_submodule("ffn").register_forward_hook(result)


def replayed(store: dist.Store, rank: int, run: RunSpec, spoiled: tuple[int, ...], layer: int, way: Way) -> list[str]:
    """What a replay says after a step, what it says once a device errs, and what is found of copies that drift."""
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, "cpu", 60.0) as axes:
        engine = Engine(run, corpus.vocabulary, axes, torch.device("cpu"))
        replay = Replay(engine)
        runs.step_at(engine, corpus, 0)
        said = [str(replay.odd(*corpus.batch(0, replay.samples), 0))]
        if rank in spoiled:
            spoil(engine, layer, way)
        for step in (1, 2):
            runs.step_at(engine, corpus, step * run.train.global_batch)
        said.append(str(replay.odd(*corpus.batch(0, replay.samples), 0)))
        return [*said, str(engine.drifted())]


def between_steps(store: dist.Store, rank: int, run: RunSpec, count: int) -> dict[str, Any]:
    """As `runs.steps`, with a replay after each step."""
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, "cpu", 60.0) as axes:
        engine = Engine(run, corpus.vocabulary, axes, torch.device("cpu"))
        replay, outcomes = Replay(engine), []
        for step in range(count):
            first = step * run.train.global_batch
            outcome = runs.step_at(engine, corpus, first)
            outcomes.append((outcome.loss, outcome.grad_norm))
            assert replay.odd(*corpus.batch(first, replay.samples), first) is None
        return {"outcomes": outcomes, "tensors": runs.kept(engine.state())}


def train(store: dist.Store, rank: int, root: str, run: RunSpec, wrong: int) -> tuple[str, bool]:
    """The trainer, of which one rank errs; what it raised, and whether this rank is suspected."""
    build = Engine._build

    def building(engine: Engine) -> Any:
        parts = build(engine)
        if rank == wrong:
            engine.parts = parts
            spoil(engine, 1, "forward")
        return parts

    Engine._build = building  # type: ignore[method-assign]
    try:
        runs.train(store, rank, root, run, 1, ())
    except Corrupted as error:
        return str(error), error.suspected
    finally:
        Engine._build = build  # type: ignore[method-assign]
    raise AssertionError("nothing was found")
