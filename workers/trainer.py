"""The loop of one rank, on one page: join, build, continue from the newest good checkpoint, step, save.

Knows neither who started it nor who hears its reports; `workers.__main__` runs it under torchrun, a Ray actor in the
service. Every decision that changes what is computed is taken by all ranks together.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from workers import bubble
from workers.blame import Drifted, NonFinite
from workers.checkpoint import logical, manifest
from workers.checkpoint.saver import Saver
from workers.checkpoint.storage import Storage
from workers.cursor import Cursor, check_model, check_order
from workers.data.corpus import Corpus
from workers.engine import Engine, Outcome
from workers.parallel import mesh
from workers.reports import CheckpointRefused, Evaluated, Finished, Moved, Report, Resumed, StepDone, StepSkipped
from workers.spec import Assignment, RunSpec
from workers.throughput import Throughput
from workers.traffic import Traffic

Listener = Callable[[Report], None]

SKIPS = 32  # steps without a number, and none further than before, before a run is given up
PUBLISHED_S = 30.0  # that a rollback waits for the publication of the last save


def train(assignment: Assignment, store: dist.Store, tell: Listener) -> None:
    """Train to the last step. Returns when this rank's last save is in storage; raises what broke it."""
    run, rank = assignment.run, assignment.rank
    tell(Moved(rank, "start", -1, time.time()))
    device = mesh.device_of(assignment.device, assignment.local_index)
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, assignment.device, assignment.timeout_s) as axes:
        tell(Moved(rank, "load", -1, time.time()))
        storage = Storage.open(assignment.root).child(assignment.job)
        saver = Saver(storage, assignment, tell)
        loop = Loop(assignment, storage, lambda: Engine(run, corpus.vocabulary, axes, device), corpus, saver, tell)
        try:
            loop.run()
            tell(Moved(rank, "end", loop.cursor.step, time.time()))
        finally:
            saver.close()
    tell(Finished(rank, loop.cursor.step))


class Loop:
    """From where the newest good checkpoint ends to the last step."""

    def __init__(
        self,
        assignment: Assignment,
        storage: Storage,
        build: Callable[[], Engine],
        corpus: Corpus,
        saver: Saver,
        tell: Listener,
    ) -> None:
        self.assignment, self.storage, self.build, self.tell = assignment, storage, build, tell
        self.corpus, self.saver, self.run_spec = corpus, saver, assignment.run
        self.other = evaluation(self.run_spec)
        layout = self.run_spec.parallel
        self.bubble = bubble.fraction(layout, max(layout.runs(self.run_spec.train.global_batch)))
        self.traffic: dict[str, dict[str, int]] | None = None
        self.leads, self.skips, self.saved, self.furthest = assignment.rank == 0, 0, 0, 0
        self.engine, self.cursor = continued(assignment, storage, build, tell)

    def run(self) -> None:
        train, every = self.run_spec.train, self.run_spec.checkpoint.every_steps
        speed = Throughput.of(self.run_spec, self.engine.vocabulary, mesh.name_of(self.engine.device))
        while self.cursor.step < train.steps:
            outcome = self.step()
            if not outcome.finite:
                self.skip(outcome)
                continue
            step = self.cursor.step
            if step > self.furthest:  # after a rollback, only what is new is progress
                self.furthest, self.skips = step, 0
            if self.leads:
                self.tell(self.done(outcome, speed))
            self.tell(Moved(self.assignment.rank, "step", step, time.time()))
            if train.drift_every and step % train.drift_every == 0:
                self.check_drift()
            if self.other is not None and step % train.eval_every == 0:
                self.evaluate(self.other)
            if step % every == 0 or step == train.steps:
                self.save()

    def step(self) -> Outcome:
        engine, batch = self.engine, self.run_spec.train.global_batch
        engine.watch.start()
        first, count = engine.share(self.cursor.samples)
        tokens = self.corpus.batch(first, count)
        engine.watch.lap("data")
        every, self.traffic = self.run_spec.train.traffic_every, None
        if every and (self.cursor.step + 1) % every == 0:
            with Traffic() as counted:
                outcome = engine.step(*tokens, first)
            self.traffic = counted.axes()
        else:
            outcome = engine.step(*tokens, first)
        if outcome.finite:
            self.cursor.advance(batch)
        return outcome

    def done(self, outcome: Outcome, speed: Throughput) -> StepDone:
        watch = self.engine.watch
        step_s = watch.total
        speed_of = (outcome.tokens / step_s, speed.mfu(step_s), watch.parts)
        memory = mesh.peak_memory(self.engine.device)
        return StepDone(
            self.cursor.step, time.time(), outcome.loss, outcome.grad_norm, outcome.learning_rate, outcome.tokens,
            self.cursor.samples, step_s, *speed_of, self.bubble, memory, self.traffic,
        )  # fmt: skip

    def skip(self, outcome: Outcome) -> None:
        """A step without a number: leave its samples out, go back, or stop, as the job wants it."""
        self.skips += 1
        policy, step = self.run_spec.train.non_finite, self.cursor.step + 1
        action = "rescale" if outcome.excused else policy
        reason = f"loss {outcome.loss}, gradient norm {outcome.grad_norm} at step {step}: first in {outcome.blame}"
        if action == "stop" or self.skips > SKIPS:
            raise NonFinite(reason)
        if self.leads:
            samples = outcome.blame.samples if outcome.blame else ()
            self.tell(StepSkipped(step, time.time(), action, reason, samples))
        if action == "rollback":
            self.roll_back()
        if action != "rescale":  # a smaller loss scale may do for the same samples
            self.cursor.skip(self.run_spec.train.global_batch)

    def roll_back(self) -> None:
        """To the newest published checkpoint, or the seed; the samples since then are left out too."""
        seen = self.cursor.samples
        resume = [self._published()] if self.leads else [()]
        dist.broadcast_object_list(resume)
        del self.engine
        gc.collect()
        assignment = dataclasses.replace(self.assignment, resume=resume[0])
        self.engine, self.cursor = continued(assignment, self.storage, self.build, self.tell)
        self.cursor.skip(seen - self.cursor.samples)

    def _published(self) -> tuple[str, ...]:
        """Newest first, once the last save is among them or will hardly be any more."""
        deadline, wanted = time.monotonic() + PUBLISHED_S, manifest.path(self.saved, self.assignment.attempt)
        self.saver.wait()
        while self.saved and wanted not in (known := manifest.published(self.storage)):
            if time.monotonic() > deadline:
                return tuple(known)
            time.sleep(0.1)
        return tuple(manifest.published(self.storage))

    def check_drift(self) -> None:
        found = [f"{name} on rank {self.assignment.rank}" for name in self.engine.drifted()]
        if problem := first_problem(", ".join(found[:3])):
            raise Drifted(f"after step {self.cursor.step} copies that must be equal are not: {problem}")

    def evaluate(self, corpus: Corpus) -> None:
        batch, losses, tokens = self.run_spec.train.global_batch, 0.0, 0
        for number in range(self.run_spec.train.eval_batches):
            loss, count = self.engine.evaluate(*corpus.batch(*self.engine.share(number * batch)))
            losses, tokens = losses + loss * count, tokens + count
        if self.leads:
            self.tell(Evaluated(self.cursor.step, time.time(), losses / max(1, tokens), tokens))

    def save(self) -> None:
        engine, step = self.engine, self.cursor.step
        self.tell(Moved(self.assignment.rank, "save", step, time.time()))
        self.saver.save(step, engine.state(), engine.axes(), self.cursor.header(self.run_spec, engine.progress()))
        self.saved = step


def evaluation(run: RunSpec) -> Corpus | None:
    """The other text, cut and ordered as the one that is trained on."""
    if run.data.eval_source is None:
        return None
    data = run.data.model_copy(update={"source": run.data.eval_source})
    return Corpus(data, run.model.seq_len, run.train.seed)


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
            engine.restore(partial(logical.load, manifest=document, storage=storage), document.header)
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
