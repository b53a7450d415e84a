"""What a controller does from taking the lease to losing it: hear, decide by the core, write, act; in that order.

It writes before it acts: a crash in between leaves a command undone, which the next reign's adoption and the sweep make
good. Knows no Ray but through its hands and its lookout.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from service.contracts import events
from service.contracts.cluster import Fleet
from service.contracts.errors import Fenced, StoreUnavailable, UserError
from service.contracts.job import folder, parse_job
from service.core import codec, machine
from service.core.commands import Command, Record
from service.core.state import Job, State
from service.runtime import adoption, rows
from service.runtime.care import Care
from service.runtime.ear import AgentGone, Ear
from service.runtime.errands import Answered, Errands
from service.runtime.growth import Growth
from service.runtime.hands import Hands
from service.runtime.herald import Herald
from service.runtime.logs import Chunk
from service.runtime.lookout import Lookout
from service.runtime.node_agent import Stopped
from service.runtime.outbox import Said
from service.runtime.retention import Retention
from service.settings import Settings
from service.store.jobs import Store
from service.store.records import Intent, JobRow, LogChunk

log = logging.getLogger("phalanx.controller")

TURN_S = 0.05
POLL_S = 0.25
TICK_S = 0.5
CARE_S = 1.0
GROW_S = 2.0
SWEEP_S = 30.0
QUEUED = 2  # deliveries of one agent

Source = tuple[str, int, str]  # job, attempt, node: one agent


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """A delivery of one agent."""

    source: Source
    said: Sequence[Said]


Item = Heard | Stopped | AgentGone | Answered | events.Event


class Deliveries:
    """How far each agent has been heard, and how far that is in the store."""

    def __init__(self) -> None:
        self._received: dict[Source, int] = {}
        self._committed: dict[Source, int] = {}
        self._queued = Counter[Source]()
        self._lock = threading.Lock()

    def enter(self, source: Source) -> bool:
        """Whether one more delivery of this agent may wait: while nothing is taken in, it tells the same again."""
        with self._lock:
            if self._queued[source] >= QUEUED:
                return False
            self._queued[source] += 1
            return True

    def leave(self, source: Source) -> None:
        with self._lock:
            self._queued[source] -= 1
            if not self._queued[source]:
                del self._queued[source]

    def committed(self, source: Source) -> int:
        return self._committed.get(source, 0)

    def fresh(self, delivery: Heard) -> list[Any]:
        """What was not heard before."""
        known = self._received.get(delivery.source, 0)
        self._received[delivery.source] = max([known, *(number for number, _ in delivery.said)])
        return [what for number, what in delivery.said if number > known]

    def commit(self) -> None:
        self._committed = dict(self._received)

    def rewind(self) -> None:
        """What was received and not committed will be told again."""
        self._received = dict(self._committed)

    def forget(self, uid: str) -> None:
        self._received = {source: number for source, number in self._received.items() if source[0] != uid}


class Reign:
    def __init__(
        self,
        epoch: int,
        holder: str,
        store: Store,
        settings: Settings,
        inbox: queue.SimpleQueue[Item],
        deliveries: Deliveries,
    ) -> None:
        self.epoch, self.holder, self.store, self.settings = epoch, holder, store, settings
        self.inbox, self.deliveries = inbox, deliveries
        self.hands = Hands(epoch, settings, inbox)
        self.errands = Errands(inbox)
        self.care = Care(inbox)
        self.growth = Growth()
        self.herald = Herald(store.hooks)
        self.retention = Retention(store, epoch, settings.storage, settings.keep_days)
        self.lookout = Lookout()
        self.state = State(fleet=self.lookout.fleet(), health=codec.load_health(store.health()))
        self.health_written = self.state.health
        self.ears: dict[str, Ear] = {}
        self.seen = 0  # highest seq of a job that was taken up
        self.fleet_written: Fleet | None = None
        self.last = dict.fromkeys(("poll", "tick", "renew", "care", "grow", "sweep"), 0.0)
        self.over = threading.Event()

    def begin(self) -> None:
        """Take up every job that has not ended, and adopt the gangs at work."""
        log.info("leading with epoch %d", self.epoch)
        self.deliveries.rewind()
        unfinished = self.store.unfinished()
        fresh = list(self._submitted([row for row, core in unfinished if core is None]))
        self.seen = max((row.seq for row, _ in unfinished), default=0)
        now = time.time()
        found = adoption.adopt([core for _, core in unfinished if core is not None], self.epoch, self.hands, now)
        self.state = dataclasses.replace(self.state, jobs={job.uid: job for job in found.jobs})
        self.ears = found.ears
        observed = events.FleetObserved(self.state.fleet, now)  # nodes were lost while nobody looked
        self._decide([*self._shares(now), *fresh, observed, *found.events], found.records, rows.Beside(), [], now)
        arguments = (self.state.fleet, self._observed, self.over)
        threading.Thread(target=self.lookout.watch, args=arguments, name="watch", daemon=True).start()
        self.herald.start()
        self.retention.start()

    def end(self) -> None:
        self.over.set()
        self.hands.close()
        self.errands.close()
        self.care.close()
        self.growth.close()
        self.herald.close()
        self.retention.close()

    def turn(self) -> None:
        """Raises Fenced when the reign is over."""
        heard: list[Heard] = []
        gone: list[AgentGone] = []
        done: list[events.Event] = []
        answered: list[int] = []
        now = time.time()
        for item in self._collected():
            match item:
                case Heard():
                    self.deliveries.leave(item.source)
                    heard.append(item)
                case Stopped():
                    heard.append(Heard((item.job, item.attempt, item.node), item.unsaid))
                case AgentGone():
                    gone.append(item)
                case Answered():
                    done.append(item.event)
                    answered.append(item.intent)
                case _:
                    done.append(item)
        happened, beside = self._listen(heard, gone, now)
        happened += done  # what a gang said comes before its end
        intents = answered + self._poll(happened, now)
        for ear in self.ears.values():
            happened += ear.due(now, self.hands.publishing(ear.uid, ear.attempt))
            if ear.wonders:
                self.lookout.doubt.set()
        if self._due("tick", TICK_S):
            happened.append(events.Ticked(now))
        self._decide(happened, [], beside, intents, now)
        self.errands.answered(answered)
        self.deliveries.commit()
        for event in happened:
            if isinstance(event, events.GangResumed):
                self.hands.resumed(event.uid)
        self._keep_house()

    def _collected(self) -> Iterator[Item]:
        """What is in the inbox; waits a moment for the first."""
        try:
            yield self.inbox.get(timeout=TURN_S)
            while True:
                yield self.inbox.get_nowait()
        except queue.Empty:
            return

    def _listen(
        self, heard: Sequence[Heard], gone: Sequence[AgentGone], now: float
    ) -> tuple[list[events.Event], rows.Beside]:
        """Events from what agents said, and what is beside them: chunks of logs count for an ended attempt too."""
        happened: list[events.Event] = []
        chunks: list[LogChunk] = []
        for delivery in heard:
            uid, attempt, _ = delivery.source
            fresh = self.deliveries.fresh(delivery)
            chunks += [rows.chunk(uid, what) for what in fresh if isinstance(what, Chunk)]
            ear = self.ears.get(uid)
            if ear is not None and ear.attempt == attempt:
                happened += ear.hear(fresh, now)
        for agent in gone:
            ear = self.ears.get(agent.job)
            if ear is not None and ear.attempt == agent.attempt:
                happened += ear.hear([agent], now)
        told = [(ear, ear.times.due(now)) for ear in self.ears.values()]
        times = [rows.times(ear.uid, ear.attempt, one, now) for ear, one in told if one is not None]
        return happened, rows.Beside(chunks, times)

    def _poll(self, happened: list[events.Event], now: float) -> list[int]:
        """New jobs and intents from the store; ids of the intents that are done with this turn."""
        if not self._due("poll", POLL_S):
            return []
        try:
            new, intents = self.store.unseen_jobs(self.seen), self.store.intents(taken=self.errands.open)
            happened += self._submitted([row for row, _ in new])
            happened += [events.NodeForgiven(node, now) for node in self.store.forgiven()]
            happened += self._shares(now)
            self.seen = max([self.seen, *(row.seq for row, _ in new)])
            return [intent.id for intent in intents if self._taken_up(intent, happened, now)]
        except StoreUnavailable as error:
            log.warning("the store is away: %s", error)
            return []

    def _shares(self, now: float) -> Iterator[events.Event]:
        queues, quotas = self.store.access.shares()
        if (queues, quotas) != (self.state.queues, self.state.quotas):
            yield events.SharesObserved(queues, quotas, now)

    def _taken_up(self, intent: Intent, happened: list[events.Event], now: float) -> bool:
        """Whether it is done by what happens now; errands take longer."""
        match intent.kind:
            case "verify" | "export":
                root = self.store.job(intent.job).spec.get("checkpoint", {}).get("root")
                self.errands.begin(intent, folder(root or self.settings.storage, intent.job))
                return False
            case "restore":
                happened.append(rows.restore(intent, self.store.checkpoints(intent.job), now))
            case _:
                happened.append(rows.request(intent, now))
        return True

    def _submitted(self, new: Sequence[JobRow]) -> Iterator[events.Event]:
        for row in new:
            try:
                yield events.JobSubmitted(row.uid, row.seq, parse_job(row.spec), row.created_at, row.project)
            except UserError as error:  # stored by another version: left in the queue, for that version to take up
                log.error("job %s can't be read: %s", row.uid, error)

    def _decide(
        self,
        happened: Sequence[events.Event],
        records: Sequence[Record],
        beside: rows.Beside,
        intents: Sequence[int],
        now: float,
    ) -> None:
        before, commands, told = self.state.jobs, list[Command](), list(records)
        for event in happened:
            try:
                decision = machine.decide(self.state, event, self.settings.limits)
            except machine.IllegalTransition as error:
                log.error("%s", error)
                continue
            self.state = decision.state
            commands += decision.commands
            told += decision.records
        changed = [job for uid, job in self.state.jobs.items() if job is not before.get(uid)]
        fleet = None if self.state.fleet == self.fleet_written else self.state.fleet
        health = self.state.health is not self.health_written
        forgiven = any(isinstance(event, events.NodeForgiven) for event in happened)
        if changed or told or beside or intents or fleet is not None or health or forgiven:
            self._commit(changed, told, happened, beside, intents, fleet, now)
        for record in told:
            log.info("%s %s: %s", record.uid, record.type, record.reason)
        self._act(commands)
        self._forget(changed)

    def _commit(
        self,
        changed: Sequence[Job],
        told: Sequence[Record],
        happened: Sequence[events.Event],
        beside: rows.Beside,
        intents: Sequence[int],
        fleet: Fleet | None,
        now: float,
    ) -> None:
        """Write, and try again while the store is away: training goes on; nothing is done that isn't written."""
        health = None if self.state.health is self.health_written else self.state.health
        changes = rows.changes(changed, told, happened, beside, intents, fleet, now, health)
        while True:
            try:
                self.store.commit(self.epoch, changes)
                break
            except StoreUnavailable as error:
                log.warning("the store is away, %d rows of metrics wait: %s", len(changes.metrics), error)
                time.sleep(POLL_S)
        self.fleet_written, self.health_written = self.state.fleet, self.state.health

    def _act(self, commands: Sequence[Command]) -> None:
        for command in commands:
            job = self.state.jobs[command.uid]
            if self.hands.do(command, job, self.state.fleet):
                self.ears[job.uid] = adoption.ear_of(job)
        for ear in self.ears.values():
            for complete in ear.take_complete():
                self.hands.publish(self.state.jobs[ear.uid], complete)

    def _forget(self, changed: Sequence[Job]) -> None:
        """Drop what has ended: it is in the store."""
        for job in changed:
            if job.placement is None:
                self.ears.pop(job.uid, None)
            if job.phase.terminal:
                self.deliveries.forget(job.uid)
                self.hands.tidy(job)
        alive = {uid: job for uid, job in self.state.jobs.items() if not job.phase.terminal}
        self.state = dataclasses.replace(self.state, jobs=alive)

    def _keep_house(self) -> None:
        if self._due("renew", self.settings.lease_ttl_s / 4):
            try:
                if not self.store.renew(self.holder, self.epoch, self.settings.lease_ttl_s):
                    raise Fenced(f"epoch {self.epoch} is over")
            except StoreUnavailable as error:
                log.warning("the lease could not be renewed: %s", error)
        if self._due("care", CARE_S):
            self.care.look(self.state)
        if self._due("grow", GROW_S):
            self.growth.look(self.state)
        if self._due("sweep", SWEEP_S):
            owned = {job.uid for job in self.state.jobs.values() if job.holds_slots}
            self.hands.sweep(owned, set(self.state.jobs), self.state.fleet)

    def _observed(self, fleet: Fleet) -> None:
        self.inbox.put(events.FleetObserved(fleet, time.time()))

    def _due(self, name: str, every_s: float) -> bool:
        now = time.monotonic()
        if now - self.last[name] < every_s:
            return False
        self.last[name] = now
        return True
