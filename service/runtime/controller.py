"""The controller: hears, decides by the core, writes, acts; in that order, and only while it holds the lease.

One named, detached actor that Ray starts again whenever it ends. What it knows is in the store; a new one reads it,
takes the lease under a higher epoch, and adopts the gangs that it finds at work. It writes before it acts: a crash in
between leaves a command undone, which adoption and the sweep make good.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from service.contracts import events
from service.contracts.cluster import Fleet
from service.contracts.errors import Fenced, PhalanxError, StoreUnavailable
from service.contracts.job import Phase, parse_job
from service.core import codec, liveness, machine
from service.core.commands import Command, Record
from service.core.state import Job, State
from service.runtime import gang, rows, watcher
from service.runtime.ear import Ear
from service.runtime.hands import Hands
from service.runtime.logs import Chunk
from service.runtime.node_agent import Said, Stopped
from service.settings import Settings
from service.store.jobs import Store
from service.store.records import Changes, LogChunk

log = logging.getLogger("phalanx.controller")

TURN_S = 0.05
POLL_S = 0.25
TICK_S = 0.5
WATCH_S = 0.5
SWEEP_S = 30.0

Source = tuple[str, int, str]  # job, attempt, node: one agent


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """A delivery of one agent."""

    source: Source
    said: Sequence[Said]


class Controller:
    def __init__(self, settings: Settings, limits: liveness.Limits = liveness.DEFAULT) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True)
        self.settings, self.limits = settings, limits
        self.identity = ray.get_runtime_context().get_actor_id()
        self.holder = f"{self.identity}/{os.getpid()}-{secrets.token_hex(4)}"
        self.inbox: queue.SimpleQueue[Heard | Stopped | events.Event] = queue.SimpleQueue()
        self.leading = False
        self.epoch = 0
        self.received: dict[Source, int] = {}
        self.committed: dict[Source, int] = {}
        threading.Thread(target=self._live, name="controller", daemon=True).start()

    # Answers to others; none of them blocks

    def hear(self, job: str, attempt: int, node: str, said: Sequence[Said]) -> int:
        """Takes in what an agent says. The number up to which it is in the store; the agent tells the rest again."""
        source = (job, attempt, node)
        if self.leading:
            self.inbox.put(Heard(source, said))
        return self.committed.get(source, 0)

    def status(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "leading": self.leading, "epoch": self.epoch, "holder": self.holder}

    # Its life

    def _live(self) -> None:
        while True:
            try:
                store = Store.open(self.settings.store, migrate=True)
                try:
                    self.epoch = self._wait_for_lease(store)
                    Reign(self, store).run()
                finally:
                    self.leading = False
                    store.close()
            except Fenced as fenced:
                log.warning("lost the lease: %s", fenced)
            except PhalanxError as error:
                log.warning("starting over: %s", error)
            except Exception:
                log.exception("starting over")
            time.sleep(1.0)

    def _wait_for_lease(self, store: Store) -> int:
        """The epoch, once the lease is ours. Ray runs one instance of this actor: an earlier one's lease is taken over."""
        while True:
            holder, epoch = store.holder()
            if holder.startswith(f"{self.identity}/") and holder != self.holder:
                store.release(holder, epoch)
            if (mine := store.acquire(self.holder, self.settings.lease_ttl_s)) is not None:
                return mine
            time.sleep(POLL_S)


class Reign:
    """From taking the lease to losing it."""

    def __init__(self, controller: Controller, store: Store) -> None:
        self.controller, self.store, self.epoch = controller, store, controller.epoch
        self.inbox, self.settings = controller.inbox, controller.settings
        self.state = State(fleet=watcher.fleet())
        self.ears: dict[str, Ear] = {}
        self.hands = Hands(self.epoch, self.settings, self.inbox)
        self.seen = 0
        self.intents: set[int] = set()
        self.last = dict.fromkeys(("poll", "tick", "renew", "sweep"), 0.0)
        self.over = threading.Event()
        self.written: Fleet | None = None

    def run(self) -> None:
        """Raises Fenced or StoreUnavailable when the reign is over."""
        log.info("leading with epoch %d", self.epoch)
        try:
            self._adopt()
            self.controller.leading = True
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
            while True:
                self._turn()
        finally:
            self.over.set()
            self.hands.close()

    def _turn(self) -> None:
        heard: list[Heard] = []
        happened: list[events.Event] = []
        for item in self._collect():
            match item:
                case Heard():
                    heard.append(item)
                case Stopped():
                    heard.append(Heard((item.job, item.attempt, item.node), item.unsaid))
                case _:
                    happened.append(item)
        now = time.time()
        chunks = self._listen(heard, happened, now)
        intents = self._poll(happened, now)
        for ear in self.ears.values():
            happened += ear.due(now)
            if ear.all_finished and not ear.complete and not self.hands.publishing(ear.uid, ear.attempt):
                happened.append(events.GangFinished(ear.uid, ear.attempt, now))
        if self._due("tick", TICK_S):
            happened.append(events.Ticked(now))
        self._decide(happened, [], chunks, intents, now)
        self.controller.committed.update(self.controller.received)
        self._housekeeping()

    def _collect(self) -> list[Any]:
        items: list[Any] = []
        try:
            items.append(self.inbox.get(timeout=TURN_S))
            while True:
                items.append(self.inbox.get_nowait())
        except queue.Empty:
            return items

    def _listen(self, heard: Sequence[Heard], happened: list[events.Event], now: float) -> list[LogChunk]:
        """Events from deliveries, each thing said taken in once."""
        chunks: list[LogChunk] = []
        for delivery in heard:
            uid, attempt, _ = delivery.source
            known = self.controller.received.get(delivery.source, 0)
            fresh = [what for number, what in delivery.said if number > known]
            self.controller.received[delivery.source] = max([known, *(number for number, _ in delivery.said)])
            ear = self.ears.get(uid)
            if ear is None or ear.attempt != attempt:
                chunks += [rows.chunk(uid, what) for what in fresh if isinstance(what, Chunk)]
                continue
            happened += ear.hear(fresh, now)
            chunks += [rows.chunk(uid, chunk) for chunk in ear.take_chunks()]
        return chunks

    def _poll(self, happened: list[events.Event], now: float) -> list[int]:
        """New jobs and intents from the store; the intents taken up in this turn."""
        if not self._due("poll", POLL_S):
            return []
        try:
            for row, _ in self.store.unseen_jobs(self.seen):
                self.seen = max(self.seen, row.seq)
                if row.uid not in self.state.jobs:
                    happened.append(events.JobSubmitted(row.uid, row.seq, parse_job(row.spec), row.created_at))
            intents = [intent for intent in self.store.intents() if intent.id not in self.intents]
        except StoreUnavailable as error:
            log.warning("the store is away: %s", error)
            return []
        happened += [events.CancelRequested(intent.job, now) for intent in intents]
        self.intents |= {intent.id for intent in intents}
        return [intent.id for intent in intents]

    def _decide(
        self,
        happened: Sequence[events.Event],
        records: list[Record],
        chunks: list[LogChunk],
        intents: list[int],
        now: float,
    ) -> None:
        before, commands = self.state.jobs, list[Command]()
        for event in happened:
            try:
                decision = machine.decide(self.state, event, self.limits)
            except machine.IllegalTransition as error:
                log.error("%s", error)
                continue
            self.state = decision.state
            commands += decision.commands
            records += decision.records
        changed = [job for uid, job in self.state.jobs.items() if job is not before.get(uid)]
        fleet = self.state.fleet if self.state.fleet != self.written else None
        if changed or records or chunks or intents or fleet is not None:
            self._commit(rows.changes(changed, records, happened, chunks, intents, fleet, now))
        self.written = self.state.fleet
        for record in records:
            log.info("%s %s: %s", record.uid, record.type, record.reason)
        self._act(commands)
        self._forget(changed)

    @property
    def limits(self) -> liveness.Limits:
        return self.controller.limits

    def _commit(self, changes: Changes) -> None:
        """Write, and try again while the store is away: training goes on, nothing is decided on what isn't written."""
        while True:
            try:
                self.store.commit(self.epoch, changes)
                return
            except StoreUnavailable as error:
                log.warning("the store is away, %d rows wait: %s", len(changes.metrics), error)
                time.sleep(POLL_S)

    def _act(self, commands: Sequence[Command]) -> None:
        for command in commands:
            job = self.state.jobs[command.uid]
            if self.hands.do(command, job, self.state.fleet):
                self.ears[job.uid] = ear_of(job)
        for ear in self.ears.values():
            job = self.state.jobs[ear.uid]
            for complete in ear.take_complete():
                self.hands.publish(job, complete)

    def _forget(self, changed: Sequence[Job]) -> None:
        """Drop what has ended: it is in the store."""
        for job in changed:
            if job.placement is None:
                self.ears.pop(job.uid, None)
        alive = {uid: job for uid, job in self.state.jobs.items() if not job.phase.terminal}
        if len(alive) != len(self.state.jobs):
            self.state = dataclasses.replace(self.state, jobs=alive)

    def _housekeeping(self) -> None:
        if self._due("renew", self.settings.lease_ttl_s / 4):
            try:
                if not self.store.renew(self.controller.holder, self.epoch, self.settings.lease_ttl_s):
                    raise Fenced(f"epoch {self.epoch} is over")
            except StoreUnavailable as error:
                log.warning("the lease could not be renewed: %s", error)
        if self._due("sweep", SWEEP_S):
            owned = {job.uid for job in self.state.jobs.values() if job.holds_slots}
            self.hands.sweep(owned)

    def _due(self, name: str, every: float) -> bool:
        now = time.monotonic()
        if now - self.last[name] < every:
            return False
        self.last[name] = now
        return True

    def _watch(self) -> None:
        """Tells of changes of the fleet. In a thread of its own: Ray's table can't be read while the head is down."""
        known = self.state.fleet
        while not self.over.wait(WATCH_S):
            try:
                fleet = watcher.fleet()
            except Exception as error:
                log.warning("Ray's node table could not be read: %s", error)
                continue
            if fleet != known:
                known = fleet
                self.inbox.put(events.FleetObserved(fleet, time.time()))

    def _adopt(self) -> None:
        """Take up every job that has not ended: gangs at work stay at work, what was half done is ended and done again."""
        jobs: dict[str, Job] = {}
        happened: list[events.Event] = []
        records: list[Record] = []
        now = time.time()
        for row, core in self.store.unfinished():
            self.seen = max(self.seen, row.seq)
            if core is None:
                happened.append(events.JobSubmitted(row.uid, row.seq, parse_job(row.spec), row.created_at))
            else:
                jobs[row.uid] = codec.load(core)
        self.state = dataclasses.replace(self.state, jobs=jobs)
        for job in jobs.values():
            if job.placement is None:
                continue
            self.ears[job.uid] = ear = ear_of(job)
            if job.stopping:
                self.hands.stop(job.uid, job.attempt)
                continue
            found, missing = self._found(job, ear, now)
            if missing:
                fault = events.Fault("gang_lost", f"a new controller found {missing} at work", step=job.step)
                happened.append(events.GangFaulted(job.uid, job.attempt, (fault,), now))
                continue
            if job.phase is Phase.PLACING:
                happened.append(events.GangStarted(job.uid, job.attempt, now))
            happened += found
            self.hands.watch(job)
            reason = f"a new controller (epoch {self.epoch}) found all {job.layout.world if job.layout else 0} ranks of attempt {job.attempt} at work"
            records.append(Record(job.uid, "GangAdopted", reason, now))
        self._decide(happened, records, [], [], now)

    def _found(self, job: Job, ear: Ear, now: float) -> tuple[list[events.Event], str]:
        """What the agents of a job's gang say at adoption; and, when ranks are missing, how many are there."""
        standings = [s for s in gang.standings(job.uid, self.epoch).values() if s.attempt == job.attempt]
        present = {rank for standing in standings for rank in standing.pids}
        ended = {report.rank for standing in standings for report in standing.ended}
        world = len(job.placement.slots) if job.placement else 0
        if len(present | ended) < world:
            return [], f"{len(present)} of {world} ranks"
        unpublished = [shard for standing in standings for shard in standing.shards if shard.step > (job.checkpoint_step or 0)]
        return ear.hear([*unpublished, *(report for standing in standings for report in standing.ended)], now), ""


def ear_of(job: Job) -> Ear:
    slots = job.placement.slots if job.placement else ()
    return Ear(job.uid, job.attempt, len(slots), {rank: slot.name for rank, slot in enumerate(slots)})


ControllerActor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=32)(Controller)
