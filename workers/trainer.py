"""The loop of one rank, on one page: join, build, continue from the newest good checkpoint, step, save.

Knows neither who started it nor who hears its reports; `workers.__main__` runs it under torchrun, a Ray actor in the
service. Every decision that changes what is computed is taken by all ranks together.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from workers.checkpoint import logical, manifest
from workers.checkpoint.saver import Saver
from workers.checkpoint.storage import Storage
from workers.cursor import Cursor, check_model, check_order
from workers.data.corpus import Corpus
from workers.engine import Engine
from workers.parallel import mesh
from workers.reports import CheckpointRefused, Finished, Moved, Report, Resumed, StepDone
from workers.spec import Assignment
from workers.throughput import Throughput

Listener = Callable[[Report], None]


def train(assignment: Assignment, store: dist.Store, tell: Listener) -> None:
    """Train to the last step. Returns when this rank's last save is in storage; raises what broke it."""
    run, rank = assignment.run, assignment.rank
    tell(Moved(rank, "start", -1, time.time()))
    device = mesh.device_of(assignment.device, assignment.local_index)
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, assignment.device, assignment.timeout_s) as axes:
        tell(Moved(rank, "load", -1, time.time()))
        storage = Storage.open(assignment.root).child(assignment.job)
        engine, cursor = continued(assignment, storage, lambda: Engine(run, corpus.vocabulary, axes, device), tell)
        saver = Saver(storage, assignment, tell)
        try:
            loop(assignment, engine, cursor, corpus, saver, tell)
            tell(Moved(rank, "end", cursor.step, time.time()))
        finally:
            saver.close()
    tell(Finished(rank, cursor.step))


def loop(assignment: Assignment, engine: Engine, cursor: Cursor, corpus: Corpus, saver: Saver, tell: Listener) -> None:
    train_spec, every = assignment.run.train, assignment.run.checkpoint.every_steps
    watch, speed = engine.watch, Throughput.of(assignment.run, engine.vocabulary, mesh.name_of(engine.device))
    while cursor.step < train_spec.steps:
        watch.start()
        batch = corpus.batch(*engine.share(cursor.samples))
        watch.lap("data")
        outcome = engine.step(*batch)
        cursor.advance(train_spec.global_batch)
        if assignment.rank == 0:
            tokens, step_s = train_spec.global_batch * assignment.run.model.seq_len, watch.total
            tell(
                StepDone(
                    cursor.step, time.time(), outcome.loss, outcome.grad_norm, outcome.learning_rate, tokens,
                    cursor.samples, step_s, tokens / step_s, speed.mfu(step_s), watch.parts,
                )
            )  # fmt: skip
        tell(Moved(assignment.rank, "step", cursor.step, time.time()))
        if cursor.step % every == 0 or cursor.step == train_spec.steps:
            tell(Moved(assignment.rank, "save", cursor.step, time.time()))
            saver.save(cursor.step, engine.state(), engine.axes(), cursor.header(assignment.run))


def continued(
    assignment: Assignment, storage: Storage, build: Callable[[], Engine], tell: Listener
) -> tuple[Engine, Cursor]:
    """An engine at the newest checkpoint that every rank could load and verify, or at the seed."""
    engine = build()
    for path in assignment.resume:
        problem, cursor = "", Cursor(assignment.attempt)
        try:
            document = manifest.load(storage, path)
            cursor = Cursor.resumed(document, assignment.attempt)
            check_model(document, assignment.run)
            check_order(document, assignment.run)
            engine.restore(partial(logical.load, manifest=document, storage=storage), cursor.step)
        except manifest.BadCheckpoint as error:  # an outage or another model condemns no checkpoint
            problem = f"rank {assignment.rank}: {error.reason}"
        if not (doubt := first_problem(problem)):
            if assignment.rank == 0:
                tell(Resumed(cursor.step, path))
            return engine, cursor
        if assignment.rank == 0:
            tell(CheckpointRefused(path, doubt))
    if assignment.resume:  # a refused checkpoint may have filled a part of it; two at once may not fit
        del engine
        gc.collect()
        engine = build()
    if assignment.rank == 0:
        tell(Resumed(0, None))
    return engine, Cursor(assignment.attempt)


def first_problem(mine: str) -> str:
    """The first rank's problem that is not empty, the same on all ranks."""
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return next((problem for problem in everyone if problem), "")


def quieten(device: str) -> None:
    """One thread a rank on CPU: ranks share the cores, and the order of sums stays the same."""
    if device == "cpu":
        torch.set_num_threads(1)
