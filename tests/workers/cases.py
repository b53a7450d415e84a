"""What the pool's processes run for the cases: engines on given batches, with a fault put in, or with drift."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tests import s3
from tests.workers import runs
from workers import continuing, trainer
from workers.blame import Drifted, NonFinite
from workers.checkpoint.saver import Saver
from workers.checkpoint.storage import Storage
from workers.cursor import Cursor
from workers.data import order
from workers.data.corpus import Corpus
from workers.engine import Engine
from workers.models.moe import MixtureOfExperts
from workers.numerics import local
from workers.parallel import mesh
from workers.reports import Report
from workers.spec import Assignment, RunSpec

Batch = tuple[np.ndarray, np.ndarray]  # tokens and targets of a step of the world, [samples, seq]

CPU = torch.device("cpu")


def given(store: dist.Store, rank: int, run: RunSpec, vocabulary: int, batches: list[Batch]) -> dict[str, Any]:
    """A step on each batch; the first one's raw gradients before them."""
    with mesh.joined(store, rank, run.parallel, "cpu", 60.0) as axes:
        engine = Engine(run, vocabulary, axes, CPU)
        first = engine.gradient(*share(engine, batches[0]))
        gradients = runs.kept(engine.gradients())
        missing = [name for name, parameter in engine.named.items() if parameter.grad is None]
        engine.optimizer.drop()
        outcomes = [engine.step(*share(engine, batch)) for batch in batches]
        return {
            "first": (first.loss, first.grad_norm, first.tokens),
            "gradients": gradients,
            "missing": missing,
            "outcomes": [(outcome.loss, outcome.grad_norm) for outcome in outcomes],
            "tensors": runs.kept(engine.state()),
        }


def share(engine: Engine, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    first, count = engine.share(0)
    tokens, targets = (torch.from_numpy(part[first : first + count].copy()) for part in batch)
    return tokens, targets


def starved(store: dist.Store, rank: int, run: RunSpec, count: int) -> dict[str, Any]:
    """A gradient and a step where no token goes to the first `count` experts."""
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, "cpu", 60.0) as axes:
        engine = Engine(run, corpus.vocabulary, axes, CPU)
        for module in (one for part in engine.parts for one in part.modules()):
            if isinstance(module, MixtureOfExperts):
                module.router.balance[:count] = -100.0
        first, count = engine.share(0)
        engine.gradient(*corpus.batch(first, count), first)
        gradients = runs.kept(engine.gradients())
        engine.optimizer.drop()
        runs.step_at(engine, corpus, 0)
        steps = [float(state["step"]) for state in engine.optimizer.inner.state.values()]
        return {"gradients": gradients, "steps": steps, "tensors": runs.kept(engine.state())}


def poison(engine: Engine, sample: int) -> None:
    """Makes the first layer's output for one sample a NaN, in training."""

    def hook(layer: nn.Module, inputs: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        if not layer.training:
            return out
        return torch.where((inputs[1].numbers == sample)[:, None, None], torch.nan, out)

    for part in engine.parts:
        if part.first:
            part.layers["0"].register_forward_hook(hook)


def poisoned(store: dist.Store, rank: int, run: RunSpec, sample: int) -> dict[str, Any]:
    """A good step, one with a NaN in `sample`'s activations, and what the parameters were before and after it."""
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, "cpu", 60.0) as axes:
        engine = Engine(run, corpus.vocabulary, axes, CPU)
        runs.step_at(engine, corpus, 0)
        poison(engine, sample)
        before = [tensor.clone() for tensor in map(local, engine.state().values())]
        outcome = runs.step_at(engine, corpus, run.train.global_batch)
        same = all(torch.equal(one, local(other)) for one, other in zip(before, engine.state().values(), strict=True))
        return {
            "blame": outcome.blame, "finite": outcome.finite, "same": same, "steps": engine.optimizer.steps,
            "excused": outcome.excused, "scale": engine.scale.value,
        }  # fmt: skip


def overflowing(store: dist.Store, rank: int, run: RunSpec, at: int) -> dict[str, Any]:
    """fp16: a step in which a gradient overflows on rank `at` alone, and the one after it."""
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, "cpu", 60.0) as axes:
        engine = Engine(run, corpus.vocabulary, axes, CPU)
        scale = engine.scale.value
        if rank == at:
            layer = next(iter(engine.parts[-1].layers.values()))
            handle = layer.ffn.register_full_backward_hook(lambda _, gradients, __: (gradients[0] * torch.inf,))
        bad = runs.step_at(engine, corpus, 0)
        if rank == at:
            handle.remove()
        scales = [scale, engine.scale.value]
        good = runs.step_at(engine, corpus, 0)
        return {
            "finite": (bad.finite, good.finite), "excused": bad.excused, "scales": scales, "loss": good.loss,
            "steps": engine.optimizer.steps,
        }  # fmt: skip


def drifting(
    store: dist.Store, rank: int, run: RunSpec, steps: int, spoiled: tuple[int, str] | None
) -> list[list[str]]:
    """What is found after `steps` steps, and after a bit of a parameter has been changed on one rank."""
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, "cpu", 60.0) as axes:
        engine = Engine(run, corpus.vocabulary, axes, CPU)
        for step in range(steps):
            runs.step_at(engine, corpus, step * run.train.global_batch)
        found = [engine.drifted()]
        if spoiled is not None:
            at, name = spoiled
            if rank == at:
                with torch.no_grad():
                    local(engine.named[name].detach()).view(-1)[-1] *= 1 + 1e-15
            found.append(engine.drifted())
        return found


def drifts(store: dist.Store, rank: int, root: str, run: RunSpec) -> str:
    """The trainer, in which one rank changes its copy of a norm; what it raised."""
    step = trainer.Loop.step

    def spoiling(loop: trainer.Loop) -> Any:
        outcome = step(loop)
        if rank == 1 and loop.cursor.step == 2:
            with torch.no_grad():
                local(loop.engine.named["layers.0.ffn_norm.weight"].detach()).add_(1e-12)
        return outcome

    trainer.Loop.step = spoiling  # type: ignore[method-assign]
    try:
        runs.train(store, rank, root, run, 1, ())
    except Drifted as error:
        return str(error)
    finally:
        trainer.Loop.step = step  # type: ignore[method-assign]
    raise AssertionError("nothing was found")


def poisoned_run(
    store: dist.Store, rank: int, root: str, run: RunSpec, sample: int, resume: tuple[str, ...] = ()
) -> list[Report] | str:
    """The trainer with a NaN in `sample`'s activations; what it reported, or raised."""
    build = Engine._build

    def poisoning(engine: Engine) -> list[nn.Module]:
        engine.parts = build(engine)
        poison(engine, sample)
        return engine.parts

    Engine._build = poisoning  # type: ignore[method-assign]
    try:
        return runs.train(store, rank, root, run, 1 + len(resume), resume)
    except NonFinite as error:
        return str(error)
    finally:
        Engine._build = build  # type: ignore[method-assign]


def spiking_run(store: dist.Store, rank: int, root: str, run: RunSpec, sample: int) -> list[Report]:
    """The trainer, in which a model is far too sure of itself at `sample`."""
    build = Engine._build

    def hook(part: nn.Module, inputs: tuple[Any, ...], logits: torch.Tensor) -> torch.Tensor:
        return torch.where((inputs[1].numbers == sample)[:, None, None], logits * 1000, logits)

    def spoiling(engine: Engine) -> list[nn.Module]:
        engine.parts = build(engine)
        for part in engine.parts:
            if part.norm is not None:
                part.register_forward_hook(hook)
        return engine.parts

    Engine._build = spoiling  # type: ignore[method-assign]
    try:
        return runs.train(store, rank, root, run, 1, ())
    finally:
        Engine._build = build  # type: ignore[method-assign]


def traced(
    store: dist.Store, rank: int, root: str, run: RunSpec, attempt: int, resume: tuple[str, ...]
) -> tuple[list[Report], list[int]]:
    """The trainer, and the ids of the samples that this rank was given; those of ranks that share them from one."""
    ids: list[int] = []
    batch = Corpus.batch

    def recording(corpus: Corpus, cursor: int, count: int) -> Any:
        ids.extend(order.samples(corpus.seed, cursor, count, corpus.size).tolist())
        return batch(corpus, cursor, count)

    Corpus.batch = recording  # type: ignore[method-assign]
    try:
        said = runs.train(store, rank, root, run, attempt, resume)
    finally:
        Corpus.batch = batch  # type: ignore[method-assign]
    pp, _, tp = run.parallel.coordinates(rank)
    return said, ids if pp == 0 and tp == 0 else []


@contextlib.contextmanager
def going_on(
    store: dist.Store, rank: int, root: str, run: RunSpec, resume: tuple[str, ...]
) -> Iterator[tuple[Engine, Cursor, Callable[[int], None], list[Report]]]:
    """An engine and its cursor as they continue, a function that saves both as a step, and what is reported."""
    said: list[Report] = []
    assignment = Assignment(
        job="run", attempt=1, token="test", rank=rank, run=run, root=root, store_host="", store_port=0, resume=resume,
        timeout_s=60.0,
    )  # fmt: skip
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    storage = Storage.open(root).child("run")
    with mesh.joined(store, rank, run.parallel, "cpu", 60.0) as axes:
        engine, cursor = continuing.continued(
            assignment, storage, lambda: Engine(run, corpus.vocabulary, axes, CPU), said.append
        )

        def save(step: int) -> None:
            saver = Saver(storage, assignment, said.append)
            state = engine.state()
            saver.save(step, state, engine.slices(state), cursor.header(run, engine.progress()))
            saver.close()

        yield engine, cursor, save, said


def layers_filled(store: dist.Store, rank: int, root: str, run: RunSpec, step: int, resume: tuple[str, ...]) -> Any:
    """Resumed or filled with each layer's own number; what each layer holds; saved as `step`."""
    with going_on(store, rank, root, run, resume) as (engine, cursor, save, said):
        layers = {name: local(p.detach()) for name, p in engine.named.items() if name.startswith("layers.")}
        if not resume:
            with torch.no_grad():
                for name, own in layers.items():
                    own.fill_(float(name.split(".")[1]))
        held = {name: sorted(own.unique().tolist()) for name, own in layers.items()}
        cursor.step = step
        save(step)
        return said, held


def carried(
    store: dist.Store, rank: int, root: str, run: RunSpec, step: int, resume: tuple[str, ...], place: dict[str, str]
) -> dict[str, Any]:
    """The state as it was continued at, or after two steps from the seed; saved as `step`. `place`: environment."""
    os.environ.update(place)
    s3.forget()
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with going_on(store, rank, root, run, resume) as (engine, cursor, save, said):
        while not resume and cursor.step < 2:
            runs.step_at(engine, corpus, cursor.samples)
            cursor.advance(run.train.global_batch)
        save(step)
        return {
            "tensors": runs.kept(engine.state()), "header": cursor.header(run, engine.progress()), "said": said,
        }  # fmt: skip
