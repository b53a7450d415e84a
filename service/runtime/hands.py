"""Carries out commands in threads, job by job in order, and answers with events in the controller's inbox.

Knows Ray and storage; decides nothing. What fails for a passing reason is tried again here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ray

from service.contracts import events
from service.contracts.cluster import Fleet, Node
from service.contracts.errors import ClusterError, Fenced
from service.contracts.job import Phase
from service.core import liveness, progress
from service.core.commands import (
    Command,
    InspectGang,
    PauseGang,
    RaiseStandbys,
    ReleaseGang,
    SaveGang,
    StartGang,
    StopGang,
)
from service.core.state import Job, Restored
from service.runtime import gang, holds, named, recall, stacks
from service.runtime.ear import AgentGone, Complete
from service.runtime.gang import Gang
from service.runtime.lanes import Lanes
from service.runtime.recall import Tier
from service.settings import Settings
from workers.checkpoint import manifest
from workers.checkpoint.publisher import Publisher
from workers.checkpoint.retention import Policy, Retention
from workers.checkpoint.retry import Retry
from workers.checkpoint.shards import Corrupt
from workers.checkpoint.storage import Storage

log = logging.getLogger("phalanx.hands")

RETRY_S = 1.0
PUBLISHING = Retry(deadline_s=300.0, first_s=1.0)  # a rank has just written there: what is away comes back
RESUME_FROM = 8  # checkpoints that an attempt may walk back over
THREADS = 32
GIVEN_UP = ("node_lost", "preempted", "gang_lost")  # faults after which a rank may live on where nobody sees it
LATE_S = 120.0  # that such a rank may still write


class Hands:
    def __init__(self, epoch: int, settings: Settings, inbox: Any) -> None:
        self.epoch, self.settings, self.inbox = epoch, settings, inbox
        self.lanes = Lanes(THREADS)
        self.gangs: dict[str, Gang] = {}  # job -> what there is of it on the cluster
        self.asides = ThreadPoolExecutor(THREADS, thread_name_prefix="aside")
        self.stopped: dict[str, int] = {}  # job -> newest attempt that was told to stop
        self.loading: dict[str, tuple[str, ...]] = {}  # job -> manifests at which its newest attempt may continue
        self.held: dict[str, contextlib.ExitStack] = {}  # job -> its hold on another job's checkpoint
        self.retentions: dict[str, tuple[int, Retention]] = {}  # job -> its newest attempt to publish, and what stays
        self.stands: dict[str, tuple[int, frozenset[str]]] = {}  # job -> its newest attempt, and the nodes of its ranks
        self.watching: set[Any] = set()  # ids of agents whose end is waited for
        self.cleared: dict[str, str] = {}  # name of each node -> its id when nothing was left of jobs that are over
        self.ended: dict[str, tuple[float, Job]] = {}  # jobs that are over and had nodes given up, and since when
        self.over = threading.Event()

    def close(self) -> None:
        self.over.set()
        self.lanes.close()
        self.asides.shutdown(wait=False, cancel_futures=True)

    def do(self, command: Command, job: Job, fleet: Fleet) -> bool:
        """Begin a command; True when a new attempt is to be listened to."""
        match command:
            case StartGang():
                self.lanes.submit(job.uid, partial(self._start, command, job, fleet))
                return True
            case StopGang():
                if job.checkpoint is not None:  # no late publication removes what is loaded next
                    self.loading[job.uid] = (job.checkpoint,)
                gone = _gone(job, fleet)
                last = job.ending is not None or stored(job)
                self.stop(command.uid, command.attempt, last=last, keep=command.keep, gone=gone)
            case ReleaseGang():
                self.lanes.submit(job.uid, partial(self._let_go, job.uid, job.phase.terminal))
            case PauseGang():
                self.lanes.submit(job.uid, partial(self._pause, job.uid, command.durable))
            case SaveGang():
                self.lanes.submit(job.uid, partial(self._save, job.uid))
            case InspectGang():
                self.asides.submit(self._inspect, command, job)
            case RaiseStandbys():
                self.lanes.submit(job.uid, partial(self._stand_by, command, job))
        return False

    def stop(self, uid: str, attempt: int, last: bool, keep: bool, gone: Collection[str] = ()) -> None:
        """Also gives up a start of this attempt that is under way. After the last attempt snapshots go too.

        `gone`: names of nodes that nobody needs to ask.
        """
        self.stopped[uid] = attempt
        self.lanes.submit(uid, partial(self._stop, uid, attempt, last, keep, gone))

    def publish(self, job: Job, complete: Complete) -> None:
        self.lanes.submit(_publishing(job.uid, job.attempt), partial(self._publish, job, complete))

    def tidy(self, job: Job) -> None:
        """The job is over: once its last checkpoint is published, what is in no manifest goes. Not while an earlier
        attempt's may still be: then it would miss its shards. Where a node was given up, again for a while: a rank
        there that comes back to the network writes what it was about to."""
        self.lanes.submit(_publishing(job.uid, job.attempt), partial(self._tidy, job))
        if any(incident.kind in GIVEN_UP for incident in job.incidents):
            self.ended.setdefault(job.uid, (time.monotonic(), job))

    def publishing(self, uid: str, attempt: int) -> bool:
        return self.lanes.busy(_publishing(uid, attempt))

    def resumed(self, uid: str) -> None:
        """The ranks have loaded: what they might have loaded is no longer kept for them."""
        self.loading.pop(uid, None)
        if uid in self.held:
            self.lanes.submit(uid, partial(self._release, uid))

    def watch(self, job: Job) -> None:
        """Tell when an agent is gone on whose node a rank stands. Each is waited for once, over all attempts."""
        nodes = frozenset(slot.name for slot in job.placement.slots) if job.placement else frozenset[str]()
        self.stands[job.uid] = job.attempt, nodes
        for node, agent in self._gang(job.uid).agents.items():
            if node in nodes and agent._actor_id not in self.watching:
                self.watching.add(agent._actor_id)
                arguments = (job.uid, node, agent)
                threading.Thread(target=self._wait_end, args=arguments, name=f"watch {node}", daemon=True).start()

    def sweep(self, owned: set[str], alive: set[str], fleet: Fleet) -> None:
        """End what no live attempt owns, and forget snapshots of jobs that are over, also on nodes that come back."""
        self.lanes.submit("sweep", partial(self._sweep, owned, alive))
        for uid, (at, job) in list(self.ended.items()):
            self.tidy(job)
            if time.monotonic() - at > LATE_S:
                del self.ended[uid]
        for node in fleet.nodes:
            if self.epoch == 1:  # nobody was there before
                self.cleared.setdefault(node.name, node.id)
            if self.cleared.get(node.name) != node.id and not self.lanes.busy(_clearing(node)):
                self.lanes.submit(_clearing(node), partial(self._clear, node, alive))

    def _start(self, command: StartGang, job: Job, fleet: Fleet) -> None:
        uid, attempt = command.uid, command.attempt
        root = job.spec.checkpoint.root or self.settings.storage
        try:
            resume = resumable(Storage.open(root).child(uid), job.checkpoint, command.rejected, command.restored)
            self.loading[uid] = resume
            origin = self._origin(job, needed=not resume)
            order = self._order(job, fleet, resume, origin)
            above = manifest.step_of(resume[0]) if resume else 0
            memory = self.asides.submit(self._remembered, command, job, fleet, above).result
            given_up = lambda: self.stopped.get(uid, 0) >= attempt or self.over.is_set()  # noqa: E731
            self._gang(uid).start(command, order, given_up, memory)
            self.watch(job)
        except Exception as error:
            if not isinstance(error, gang.GangRefused | OSError):
                log.exception("starting %s", uid)
            self._free(uid)
            node, unsound = (error.node, error.unsound) if isinstance(error, gang.GangRefused) else (None, {})
            for name, found in unsound.items():
                self._tell(events.NodeProbed(name, False, found, time.time()))
            self._tell(events.GangRefused(uid, attempt, str(error) or repr(error), time.time(), node))
        else:
            self._tell(events.GangStarted(uid, attempt, time.time()))

    def _remembered(self, command: StartGang, job: Job, fleet: Fleet, above: int) -> Tier | None:
        """The memory tier of the attempt, and what is in it."""
        if job.spec.checkpoint.snapshot_every == 0:
            return None
        where = (named.NAMESPACE, self.settings.snapshots, self.settings.snapshot_bytes)
        return recall.prepare(command, fleet, job.spec.run(command.layout), self.epoch, *where, above)

    def _gang(self, uid: str) -> Gang:
        if uid not in self.gangs:
            self.gangs[uid] = Gang(uid, found=True)
        return self.gangs[uid]

    def _order(
        self, job: Job, fleet: Fleet, resume: tuple[str, ...] = (), origin: tuple[str, str] | None = None
    ) -> gang.Order:
        root = job.spec.checkpoint.root or self.settings.storage
        addresses = {node.id: node.address for node in fleet.nodes}
        settings = self.settings
        given = (self.epoch, job.spec, root, settings.scratch, settings.kernel_log, addresses)
        weights = job.spec.init_from.huggingface if job.spec.init_from else None
        return gang.Order(*given, resume, origin, liveness.probes(job), weights)

    def _stand_by(self, command: RaiseStandbys, job: Job) -> None:
        try:
            self._gang(command.uid).stand_by(command, self._order(job, Fleet()))
        except (ClusterError, ray.exceptions.RayError) as error:
            log.warning("standbys of %s: %s", command.uid, error)

    def _inspect(self, command: InspectGang, job: Job) -> None:
        """Beside all else of the job: it may be stopped meanwhile."""
        looks = self._gang(command.uid).inspect(self.epoch)
        odd = stacks.odd(looks)
        found = "; ".join(f"{count} {state}" for state, count in stacks.states(looks).items())
        message = f"{command.message}\nof {len(looks)} ranks that were found: {found}"
        rank, node = (odd.rank, odd.node) if odd is not None else (None, None)
        fault = events.Fault("hang", message, rank, node, job.step, stacks.text(looks, odd))
        self._tell(events.GangFaulted(command.uid, command.attempt, (fault,), time.time()))

    def _pause(self, uid: str, durable: bool) -> None:
        self._gang(uid).pause(self.epoch, durable)

    def _save(self, uid: str) -> None:
        self._gang(uid).save(self.epoch)

    def _stop(self, uid: str, attempt: int, last: bool, keep: bool, gone: Collection[str]) -> None:
        self._free(uid, keep, gone)
        if last:
            self._forget(uid)
            self.stands.pop(uid, None)
        self._release(uid)
        self._tell(events.GangStopped(uid, attempt, time.time()))

    def _let_go(self, uid: str, last: bool) -> None:
        self._free(uid)
        if last:
            self._forget(uid)

    def _origin(self, job: Job, needed: bool) -> tuple[str, str] | None:
        """The checkpoint of another job at which this one begins; held until it is loaded, where it is `needed`."""
        if job.spec.init_from is None or job.spec.init_from.job is None:
            return None
        home, path = job.spec.init_from.origin
        if needed:
            storage = Storage.open(home)
            self._release(job.uid)
            self.held[job.uid] = contextlib.ExitStack()
            self.held[job.uid].enter_context(holds.held(storage, path))
        return home, path

    def _release(self, uid: str) -> None:
        try:
            self.held.pop(uid, contextlib.ExitStack()).close()
        except OSError as error:  # it ends by itself
            log.warning("the hold of %s could not be removed: %s", uid, error)

    def _free(self, uid: str, keep: bool = False, gone: Collection[str] = ()) -> None:
        """Until everything of the job is gone, or, where the rest is kept, its ranks are; or this reign."""
        while not self.over.is_set():
            try:
                held = self._gang(uid)
                for stopped in held.stop(self.epoch, gone) if keep else held.free(self.epoch):
                    self.inbox.put(stopped)
                if not keep:
                    self.gangs.pop(uid, None)
                return
            except Fenced:
                return
            except (ClusterError, ray.exceptions.RayError) as error:
                log.warning("stopping %s: %s", uid, error)
                self.over.wait(RETRY_S)

    def _forget(self, uid: str) -> None:
        """What is in memory of a job that is over; what could not be reached now, a sweep will."""
        try:
            recall.forget(uid, self.epoch, named.NAMESPACE)
        except ray.exceptions.RayError as error:
            log.warning("snapshots of %s: %s", uid, error)

    def _publish(self, job: Job, complete: Complete) -> None:
        assert job.layout is not None
        root = job.spec.checkpoint.root or self.settings.storage
        storage = Storage.open(root).child(job.uid)
        token = manifest.token_of(complete.records[0].index)  # of the epoch that started the gang
        retention = self._retention(job, storage)
        publisher = Publisher(storage, job.uid, job.attempt, token, job.spec.run(job.layout), retention)
        try:
            path = PUBLISHING.run(lambda: publisher.publish(complete.step, complete.records), self.over)
        except FileExistsError:  # by an earlier try whose answer was lost; the name is this attempt's own
            path = manifest.path(complete.step, job.attempt)
        except (OSError, manifest.Incomplete, Corrupt) as error:
            reason = f"not published: {error}"
            self._tell(events.SaveFailed(job.uid, job.attempt, complete.step, reason, time.time()))
            return
        nbytes = sum(record.nbytes for record in complete.records)
        self._tell(events.CheckpointPublished(job.uid, job.attempt, complete.step, path, time.time(), nbytes))
        try:
            rejected, loading = {*job.rejected, *undone(storage, job.restored)}, self.loading.get(job.uid, ())
            publisher.retain(rejected, loading, progress.best_kept(job))
        except OSError as error:
            log.warning("old checkpoints of %s could not be removed: %s", job.uid, error)

    def _tidy(self, job: Job) -> None:
        if any(self.publishing(job.uid, attempt) for attempt in range(1, job.attempt)):
            log.warning("unpublished shards of %s stay: an earlier attempt still publishes", job.uid)
            return
        storage = Storage.open(job.spec.checkpoint.root or self.settings.storage).child(job.uid)
        try:
            self._retention(job, storage).finish()
        except OSError as error:
            log.warning("shards of %s that were never published could not be removed: %s", job.uid, error)
        self.retentions.pop(job.uid, None)

    def _retention(self, job: Job, storage: Storage) -> Retention:
        """One an attempt: it remembers what it has looked at."""
        attempt, known = self.retentions.get(job.uid, (0, None))
        if known is None or attempt != job.attempt:
            known = Retention(storage, Policy(job.spec.checkpoint.keep, job.spec.checkpoint.keep_every))
            self.retentions[job.uid] = job.attempt, known
        return known

    def _sweep(self, owned: set[str], alive: set[str]) -> None:
        try:
            for uid in named.jobs_held() - owned:
                log.warning("%s is held by no live attempt: ending it", uid)
                self.lanes.submit(uid, partial(self._free, uid))
            for uid in recall.jobs_kept(named.NAMESPACE) - alive:
                log.warning("%s is over and has snapshots: forgetting them", uid)
                self.lanes.submit(uid, partial(self._forget, uid))
        except ray.exceptions.RayError as error:
            log.warning("sweep: %s", error)

    def _clear(self, node: Node, alive: set[str]) -> None:
        """Of a node that was given up, and came back with what it had in memory."""
        try:
            if recall.clear(node, self.settings.snapshots, alive):
                self.cleared[node.name] = node.id
        except ray.exceptions.RayError as error:
            log.warning("what %s came back with: %s", node.name, error)

    def _wait_end(self, uid: str, node: str, agent: Any) -> None:
        try:
            ray.get(agent.wait_end.remote())
        except ray.exceptions.RayError as error:
            self.watching.discard(agent._actor_id)
            attempt, nodes = self.stands.get(uid, (0, frozenset[str]()))
            if node in nodes:
                message = f"the agent on node {node} is gone: {type(error).__name__}"
                self._tell(AgentGone(uid, attempt, node, message))

    def _tell(self, event: events.Event | AgentGone) -> None:
        if not self.over.is_set():
            self.inbox.put(event)


def stored(job: Job) -> bool:
    """Whether a job that is suspended needs nothing of what is in memory any more."""
    return job.phase is Phase.SUSPENDING and job.checkpoint_step is not None and job.checkpoint_step >= job.step


def resumable(
    storage: Storage, newest: str | None, rejected: Collection[str], restored: Restored | None = None
) -> tuple[str, ...]:
    """The checkpoints that an attempt may continue at, newest first. OSError where there must be one and is none:
    to begin again at the seed would throw away what was trained.
    """
    published = manifest.published(storage)
    if newest is not None and not published:
        raise OSError(f"{newest} was published, and {storage.uri} holds no checkpoint: is it mounted?")
    barred = {*rejected, *undone(storage, restored)}
    return tuple(path for path in published if path not in barred)[:RESUME_FROM]


def undone(storage: Storage, restored: Restored | None) -> set[str]:
    """The checkpoints that a job has gone back over, those too that were published after it was asked to."""
    if restored is None:
        return set()
    return {path for path in manifest.published(storage) if restored.bars(*manifest.key_of(path))}


def _gone(job: Job, fleet: Fleet) -> frozenset[str]:
    """Names of the job's nodes that the fleet no longer has, not under another id either."""
    placement = job.placement or job.kept
    slots = (*placement.slots, *placement.spares) if placement else ()
    return frozenset(slot.name for slot in slots) - {node.name for node in fleet.nodes}


def _clearing(node: Node) -> str:
    return f"clear {node.id}"


def _publishing(uid: str, attempt: int) -> str:
    return f"publish {uid} {attempt}"
