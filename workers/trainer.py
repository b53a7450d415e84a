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

from workers import bubble, continuing, spikes
from workers.blame import Drifted, NonFinite
from workers.checkpoint import manifest
from workers.checkpoint.memory import Memory, Note, Rhythm
from workers.checkpoint.saver import Saver
from workers.checkpoint.storage import Storage
from workers.data.corpus import Corpus
from workers.engine import Engine, Outcome
from workers.parallel import mesh
from workers.pulse import Pulse
from workers.replay import Corrupted, Replay
from workers.reports import (
    Finished,
    LossSpiked,
    Moved,
    Paused,
    Report,
    StepDone,
    StepSkipped,
)
from workers.spec import Assignment
from workers.throughput import Throughput
from workers.traffic import Traffic
from workers.validation import Validation
from workers.wishes import Wishes

Listener = Callable[[Report], None]

SKIPS = 32  # steps without a number, and none further than before, before a run is given up
EVERYTHING = 1 << 62
PUBLISHED_S = 30.0  # that a rollback waits for the publication of the last save


def train(
    assignment: Assignment,
    store: dist.Store,
    tell: Listener,
    memory: Memory | None = None,
    wishes: Wishes | None = None,
    heard: Callable[[], int] = lambda: EVERYTHING,
) -> None:
    """Train to the last step. Returns when this rank's last save is in storage; raises what broke it.

    With `memory` snapshots are kept there, and the newest whole one is where training continues. What `wishes` say on
    some rank, all of them do after the step under way. `heard`: the last step of which what rank 0 said is known for
    good; of those after it, snapshots tell.
    """
    run, rank = assignment.run, assignment.rank
    tell(Moved(rank, "start", -1, time.time()))
    device = mesh.device_of(assignment.device, assignment.local_index)
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, assignment.device, assignment.timeout_s) as axes:
        tell(Moved(rank, "load", -1, time.time()))
        storage = Storage.open(assignment.root).child(assignment.job)
        saver = Saver(storage, assignment, tell, memory)
        build = partial(Engine, run, corpus.vocabulary, axes, device)
        loop = Loop(assignment, storage, build, corpus, saver, tell, wishes or Wishes(), heard)
        try:
            loop.run()
            tell(Moved(rank, "end", loop.cursor.step, time.time()))
        finally:
            saver.close()
    step = loop.cursor.step
    tell(Finished(rank, step) if loop.over() else Paused(rank, step))


class Loop:
    """From where the newest good checkpoint ends to the last step, or to a pause."""

    def __init__(
        self,
        assignment: Assignment,
        storage: Storage,
        build: Callable[[], Engine],
        corpus: Corpus,
        saver: Saver,
        tell: Listener,
        wishes: Wishes,
        heard: Callable[[], int],
    ) -> None:
        self.assignment, self.storage, self.build, self.tell = assignment, storage, build, tell
        self.wishes, self.heard = wishes, heard
        self.corpus, self.saver, self.run_spec = corpus, saver, assignment.run
        asked = self.run_spec.eval
        self.validation = None if asked is None else Validation(self.run_spec, asked)
        layout = self.run_spec.parallel
        self.bubble = bubble.fraction(layout, max(layout.runs(self.run_spec.train.global_batch)))
        self.traffic: dict[str, dict[str, int]] | None = None
        self.step_s = 0.0  # of the last step
        self.leads, self.skips, self.saved, self.furthest, self.rolled = assignment.rank == 0, 0, 0, 0, 0
        self.base = continuing.base(assignment, storage)
        self.engine, self.cursor = continuing.continued(assignment, storage, build, tell, saver.memory)
        self.engine.before_update = saver.copies.order
        self.replay = self.replaying()
        self.spiking = False  # and it was told
        self.leave_out()
        self.verified = self.cursor.step  # the newest step at which replicas computed the same
        self.pulse = Pulse(self.engine.device)
        self.rhythm = Rhythm(self.run_spec.checkpoint.snapshot_every, assignment.world, self.cursor.step)

    def over(self) -> bool:
        """Whether nothing is left to do: after the last step, or where it ends early."""
        judges = self.validation
        ends = judges is not None and (judges.spec.only or judges.spec.enough(self.cursor.worse))
        return ends or self.cursor.step >= self.run_spec.train.steps

    def run(self) -> None:
        if self.validation is not None and self.validation.spec.only:
            self.validate(self.validation)
            return
        self.train()

    def train(self) -> None:
        train, every = self.run_spec.train, self.run_spec.checkpoint.every_steps
        speed = Throughput.of(self.run_spec, self.engine.vocabulary, mesh.name_of(self.engine.device))
        self.save_unpublished()
        while not self.over():
            beat = self.pulse.beat()
            outcome = self.step()
            if not outcome.finite:
                self.skip(outcome)
                continue
            if self.spiked(outcome):
                continue
            step = self.cursor.step
            if step > self.furthest:  # after a rollback, only what is new is progress
                self.furthest, self.skips = step, 0
            if self.leads:
                done = self.done(outcome, speed)
                self.cursor.remember(done)
                self.cursor.heard(self.heard())
                self.tell(done)
            self.tell(Moved(self.assignment.rank, "step", step, time.time(), beat, self.engine.watch.parts))
            if train.drift_every and step % train.drift_every == 0:
                self.check_drift()
            if self.replay is not None and step % train.replay_every == 0:
                self.check_replay(self.replay)
            better = False
            if self.validation is not None and self.validation.spec.due(step, train.steps):
                better = self.validate(self.validation)
            agreed = Note(*outcome.aside)
            self.save(agreed, due=step % every == 0 or better or self.over())
            if agreed.pausing:
                return

    def step(self) -> Outcome:
        engine, batch = self.engine, self.run_spec.train.global_batch
        self.step_s = engine.watch.total
        engine.watch.start()
        first, count = engine.share(self.cursor.samples)
        tokens, starts = self.corpus.batch(first, count), self.corpus.starts(first, count)
        engine.watch.lap("data")
        every, self.traffic = self.run_spec.train.traffic_every, None
        if every and (self.cursor.step + 1) % every == 0:
            with Traffic() as counted:
                outcome = engine.step(*tokens, first, self.note, starts)
            self.traffic = counted.axes()
        else:
            outcome = engine.step(*tokens, first, self.note, starts)
        if outcome.finite:
            self.cursor.advance(batch)
        return outcome

    def note(self) -> Note:
        """What ranks have to know of each other to agree on a snapshot after this step, and on its being the last."""
        saver = self.saver
        asked = self.wishes.pausing(), self.wishes.saving()
        return Note(saver.busy, saver.lacking, saver.cost_s, self.step_s, *asked)

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

    def spiked(self, outcome: Outcome) -> bool:
        """Whether the loss is so unusual that the run has gone back for it. Alike on all ranks, as the loss is."""
        policy, cursor, loss = self.run_spec.train.spikes, self.cursor, outcome.loss
        found = None if policy.action == "off" else spikes.band(cursor.losses, policy)
        if found is None or loss <= found[1]:
            self.spiking = False
            cursor.felt(loss, policy.window)
            return False
        samples = (cursor.samples - self.run_spec.train.global_batch, cursor.samples)
        goes_back = policy.action == "rollback" and self.skips < SKIPS
        if self.leads and (goes_back or not self.spiking):
            self.tell(LossSpiked(cursor.step, time.time(), loss, *found, samples))
        self.spiking = True
        if not goes_back:
            cursor.felt(loss, policy.window)  # where it stays there, that is what is usual
            return False
        self.skips += 1
        if self.leads:
            reason = f"loss {loss:.4f}, where up to {found[1]:.4f} is usual"
            self.tell(StepSkipped(cursor.step, time.time(), "rollback", reason, samples))
        self.roll_back()
        self.spiking = False
        return True

    def leave_out(self) -> None:
        """Samples after the step at which the run continues, by request."""
        if self.assignment.skip is not None and self.assignment.skip[0] == self.cursor.step:
            self.cursor.skip(self.assignment.skip[1])

    def roll_back(self) -> None:
        """To the newest published checkpoint, or the seed; the samples since then are left out too.

        What is saved from here on goes to folders of its own: steps are done again, and files are never written twice.
        """
        seen = self.cursor.samples
        resume = [self._published()] if self.leads else [()]
        dist.broadcast_object_list(resume)
        del self.engine
        gc.collect()
        assignment = dataclasses.replace(self.assignment, resume=resume[0])
        self.engine, self.cursor = continuing.continued(assignment, self.storage, self.build, self.tell)
        self.engine.before_update = self.saver.copies.order
        self.replay = self.replaying()
        self.cursor.skip(seen - self.cursor.samples)
        self.rolled += 1
        self.saver.assignment = dataclasses.replace(assignment, token=f"{assignment.token}+{self.rolled}")
        self.rhythm.last = self.cursor.step

    def _published(self) -> tuple[str, ...]:
        """Of this attempt and of those it might have begun at, newest first; once the last save is among them or will
        hardly be any more."""
        attempt, known = self.assignment.attempt, list[str]()
        deadline, wanted = time.monotonic() + PUBLISHED_S, manifest.path(self.saved, attempt)
        self.saver.wait()
        while True:
            known = manifest.published(self.storage)
            if not self.saved or wanted in known or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return tuple(path for path in known if path in self.assignment.resume or manifest.attempt_of(path) == attempt)

    def check_drift(self) -> None:
        found = [f"{name} on rank {self.assignment.rank}" for name in self.engine.drifted()]
        if problem := continuing.first_problem(", ".join(found[:3])):
            raise Drifted(f"after step {self.cursor.step} copies that must be equal are not: {problem}")

    def replaying(self) -> Replay | None:
        asked = self.run_spec.train.replay_every and self.run_spec.parallel.dp > 1
        return Replay(self.engine) if asked else None

    def check_replay(self, replay: Replay) -> None:
        """The newest step's first samples, by every replica."""
        step, first = self.cursor.step, self.cursor.samples - self.run_spec.train.global_batch
        count = replay.samples
        odd = replay.odd(*self.corpus.batch(first, count), first, self.corpus.starts(first, count))
        if odd is not None:
            since = f"they last agreed after step {self.verified}" if self.verified else "they have never agreed"
            error = Corrupted(f"after step {step} replicas computed the same and got different figures: {odd}; {since}")
            error.suspected = self.assignment.rank in odd.ranks
            raise error
        self.verified = step

    def validate(self, validation: Validation) -> bool:
        """Whether this state is to be kept as the best so far."""
        told, best = validation.evaluate(self.engine, self.cursor)
        if self.leads:
            self.tell(told)
        return best and validation.spec.keep_best

    def save(self, agreed: Note, due: bool) -> None:
        """To storage where that is due or wished for, to memory where all agreed to; before a pause to one of them."""
        step, durable = self.cursor.step, due or agreed.saving > 0
        snapshot = self.rhythm.due(step, agreed, wanted=durable)
        if agreed.pausing:
            snapshot = not agreed.lacking
            durable = durable or not snapshot
        if durable:
            self.tell(Moved(self.assignment.rank, "save", step, time.time()))
            self.wishes.saved()
        if durable or snapshot:
            self.keep(durable, snapshot)

    def save_unpublished(self) -> None:
        """Memory may be ahead of storage: a checkpoint that was due there is written where it is not published."""
        step, run = self.cursor.step, self.run_spec
        origin = (self.assignment.origin[1],) if self.assignment.origin else ()
        published = {manifest.step_of(path) for path in (*self.assignment.resume, *origin)}
        if step in (0, *published) or (step % run.checkpoint.every_steps and not self.over()):
            return
        self.keep(durable=True, snapshot=False)

    def keep(self, durable: bool, snapshot: bool) -> None:
        engine = self.engine
        if durable:
            self.saved = self.cursor.step
        state, header = engine.state(), self.cursor.header(self.run_spec, engine.progress())
        if self.run_spec.model.lora:
            header["base"] = self.base  # without which adapters are nothing
        told = self.cursor.told() if self.leads else {}
        slices = engine.slices(state)
        self.saver.save(self.cursor.step, state, slices, header, durable=durable, snapshot=snapshot, told=told)


def quieten(device: str) -> None:
    """One thread a rank on CPU: ranks share the cores, and the order of sums stays the same."""
    if device == "cpu":
        torch.set_num_threads(1)
