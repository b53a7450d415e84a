"""Steps of a run once more, in one process a rank on this machine: what each gives. Nothing is saved anywhere.

What is done is what the trainer does that changes what is computed: the same samples to the same replicas, the same
sums in the same order. Knows neither what the steps gave when they were done, nor what it means where that differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from workers import continuing, trainer
from workers.checkpoint.memory import Note
from workers.checkpoint.storage import Storage
from workers.data.corpus import Corpus
from workers.data.text import DataError
from workers.engine import Engine, Outcome
from workers.parallel import compiled, mesh
from workers.reports import CheckpointRefused, Report
from workers.spec import Assignment
from workers.stretch import Redone, Stretch

Tell = Callable[[Redone], None]

RESCALES = 64  # of fp16's loss scale in a row, before a step counts as one without a number


def rerun(store: dist.Store, rank: int, stretch: Stretch, tell: Tell) -> None:
    """As `rank` of the stretch's layout; rank 0 tells of each step. ValueError: it can't begin where it should."""
    run, assignment = stretch.run, stretch.assignment(rank)
    device = mesh.device_of(stretch.device, rank)
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, stretch.device, assignment.timeout_s) as axes:
        engine = _begun(assignment, stretch.begin, partial(Engine, run, corpus.vocabulary, axes, device))
        for step, first in enumerate(stretch.samples, stretch.begin + 1):
            outcome = _step(engine, corpus, first)
            if rank == 0:
                tell(Redone(step, outcome.loss, outcome.grad_norm))
            if not outcome.finite:
                return


def _begun(assignment: Assignment, step: int, build: Callable[[], Engine]) -> Engine:
    """An engine after `step`: at the one checkpoint there is to load, and no other."""
    refused: list[str] = []

    def tell(report: Report) -> None:
        if isinstance(report, CheckpointRefused):
            refused.append(report.reason)

    storage = Storage.open(assignment.root).child(assignment.job)
    engine, cursor = continuing.continued(assignment, storage, build, tell)
    reason = continuing.first_problem(", ".join(refused))
    if reason or cursor.step != step:
        raise ValueError(f"the checkpoint of step {step} can't be loaded: {reason or f'it is of step {cursor.step}'}")
    return engine


def _step(engine: Engine, corpus: Corpus, first: int) -> Outcome:
    """On the samples from number `first` on. A loss scale that was too high is lowered, as it was then."""
    begin, count = engine.share(first)
    tokens, starts = corpus.batch(begin, count), corpus.starts(begin, count)
    for _ in range(RESCALES):
        outcome = engine.step(*tokens, begin, Note, starts)  # a note, as in training: sums go by how much is summed
        if outcome.finite or not outcome.excused:
            break
    return outcome


def main(text: str) -> int:
    """A Stretch as JSON -> a JSON line a step on standard output; 2 and a line on standard error where it can't be."""
    stretch = Stretch.model_validate_json(text)
    world = stretch.run.parallel.world
    if stretch.device == "gpu" and (found := torch.cuda.device_count()) < world:
        return _refused(f"{stretch.run.parallel} needs {world} GPUs, and there are {found} here")
    _prepare(stretch.assignment(0).timeout_s)
    try:
        with tempfile.TemporaryDirectory() as folder:
            if world == 1:
                _rank(0, 1, folder, stretch)
            else:
                processes.spawn(_rank, (world, folder, stretch), nprocs=world)
    except processes.ProcessRaisedException as error:
        return _refused(str(error).strip().splitlines()[-1])
    except (DataError, ValueError, OSError) as error:
        return _refused(str(error))
    return 0


def _prepare(timeout_s: float) -> None:
    """The environment of ranks, which processes started from here inherit."""
    kept = Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}" / "kept"
    for name, value in compiled.environment(kept, timeout_s).items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _rank(rank: int, world: int, folder: str, stretch: Stretch) -> None:
    trainer.quieten(stretch.device)
    with _alone() as out:

        def tell(redone: Redone) -> None:
            out.write(json.dumps(dataclasses.asdict(redone)) + "\n")
            out.flush()

        rerun(dist.FileStore(f"{folder}/store", world), rank, stretch, tell)


@contextlib.contextmanager
def _alone() -> Iterator[TextIO]:
    """Standard output for lines about steps; what a model or a library writes there goes to standard error."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(own, "w", closefd=False) as out:
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(own, 1)
        os.close(own)


def _refused(reason: str) -> int:
    sys.stderr.write(f"{reason}\n")
    return 2
