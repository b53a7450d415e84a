"""Starts, ends and swaps gangs: a placement group a node, pinned to it, with one agent and the job's processes in it.

Everything is detached and named after the job, so that whoever holds the lease can find it again: a gang outlives its
controller. What an attempt leaves standing the next one takes, and what it does not need is freed: all or nothing.
Knows no job state; does what a command says, and what it leaves behind can be stopped by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from service.contracts.errors import ClusterError
from service.contracts.job import JobSpec
from service.core.commands import RaiseStandbys, StartGang
from service.core.state import Restored, Slot
from service.runtime import named, processes
from service.runtime.node_agent import NodeAgentActor, Standby, Standing, Stopped
from service.runtime.recall import Tier
from service.runtime.stacks import Look
from workers.spec import Assignment

log = logging.getLogger("phalanx.gang")

GROUP_READY_S = 10.0
ACTORS_READY_S = 110.0
PROBED_S = 300.0
STOP_S = 30.0
INSPECT_S = 4.0


class GangRefused(ClusterError):
    """The slots of the placement could not be had. `node`: the one that had no room, where it was one.

    `unsound`: what the probe of each node found that did not pass it.
    """

    code = "gang_refused"
    node: str | None = None
    unsound: Mapping[str, str] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What a gang is started with, beside its command."""

    epoch: int
    spec: JobSpec
    root: str
    scratch: str
    kernel_log: str
    addresses: dict[str, str]  # node id -> IP literal
    resume: tuple[str, ...]
    origin: tuple[str, str] | None = None  # (another job's folder, manifest), for a job without a checkpoint
    probe: bool = False  # nodes are probed first
    weights: str | None = None  # folder of a model, for a job without a checkpoint

    @property
    def token(self) -> str:
        return f"{self.epoch:x}"

    def assignment(self, command: StartGang, rank: int, host: str, port: int) -> Assignment:
        return Assignment(
            job=command.uid, attempt=command.attempt, token=self.token, rank=rank, run=self.spec.run(command.layout),
            root=self.root, store_host=host, store_port=port, device=self.spec.resources.device,
            resume=self.resume, origin=self.origin, skip=_skip(command.restored),
            weights=self.weights,
        )  # fmt: skip


class Gang:
    """What there is of one job on the cluster. Its handles are kept: they work while the head is down."""

    def __init__(self, uid: str, found: bool = False) -> None:
        self.uid = uid
        self.agents: dict[str, Any] = {}  # node name -> handle
        self.lost: set[str] = set()  # nodes on which something is left that nobody can use
        if found:
            self._find()

    def start(
        self,
        command: StartGang,
        order: Order,
        abandoned: Callable[[], bool],
        memory: Callable[[], Tier | None] = lambda: None,
    ) -> None:
        """Every rank has its process and its assignment. Raises GangRefused; `free` then frees what is held.

        `memory` is asked once the processes are there, for what they find in it.
        """
        ranks = _ranks(command.placement.slots)
        try:
            self._hold(command, order)
            if order.probe:
                self._probe(list(ranks), order.epoch, abandoned)
            mustered = [
                self.agents[node].muster.remote(order.epoch, [slot for slot, _ in places])
                for node, places in ranks.items()
            ]
            _wait(mustered, abandoned)
            first = command.placement.slots[0]
            address = order.addresses[first.node]
            host, port = ray.get(self.agents[first.name].host_store.remote(order.epoch, address), timeout=30)
            tier = memory()
            started = [
                self.agents[node].start.remote(
                    order.epoch,
                    {slot: order.assignment(command, rank, host, port) for slot, rank in places},
                    tier.place(node) if tier else None,
                )
                for node, places in ranks.items()
            ]
            ray.get(started, timeout=30)
        except (ray.exceptions.RayError, GangRefused, KeyError) as error:
            refused = GangRefused(f"attempt {command.attempt} could not be started: {_first_line(error)}")
            refused.node = getattr(error, "node", None)
            refused.unsound = getattr(error, "unsound", {})
            raise refused from error

    def stand_by(self, command: RaiseStandbys, order: Order) -> None:
        """Somebody gets ready behind every rank, and on every spare slot that can be had. Does not wait for that.

        Spares that are none any more are freed.
        """
        run, placement = order.spec.run(command.layout), command.placement
        slots = [*enumerate(placement.slots), *enumerate(placement.spares)]
        held = _by_node(slot for _, slot in slots)
        self._leave(set(self.agents) - set(held), order.epoch)
        known = set(self.agents)
        for node in self._reserve(placement.spares, order):
            log.warning("%s has no room for the spare slots of %s", node, self.uid)
        for node in set(self.agents) - known:
            self.agents[node].begin.remote(order.epoch, command.attempt, held[node])
        wanted: dict[str, dict[int, Standby]] = {}
        for rank, slot in slots:
            wanted.setdefault(slot.name, {})[slot.index] = run, rank % len(placement.slots)
        for node, standbys in wanted.items():
            if node in self.agents:
                self.agents[node].stand_by.remote(order.epoch, standbys)

    def pause(self, epoch: int, durable: bool) -> None:
        """All ranks are to end after the step under way; `durable`: with its state in storage."""
        for agent in self.agents.values():
            agent.pause.remote(epoch, durable)

    def save(self, epoch: int) -> None:
        """All ranks are to write the step under way to storage."""
        for agent in self.agents.values():
            agent.save.remote(epoch)

    def inspect(self, epoch: int) -> list[Look]:
        """Where every rank stands, as far as its agent answers soon."""
        asked = [agent.inspect.remote(epoch) for agent in self.agents.values()]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=INSPECT_S) if asked else ([], [])
        found: list[Look] = []
        for answer in answered:
            with contextlib.suppress(ray.exceptions.RayError):
                found += ray.get(answer)
        return sorted(found, key=lambda look: look.rank)

    def stop(self, epoch: int, gone: Container[str] = ()) -> list[Stopped]:
        """End all ranks; agents and standbys stay. What the agents had left to say. Nodes that are gone aren't asked.

        Raises ClusterError when a process would not go.
        """
        there = {node: agent for node, agent in self.agents.items() if node not in gone}
        stopped = _stopped(there, epoch, keep=True)
        for node in set(self.agents) - {answer.node for answer in stopped}:
            del self.agents[node]
            self.lost.add(node)
        return stopped

    def free(self, epoch: int) -> list[Stopped]:
        """End all processes of the job and free its slots; safe to repeat. As `stop`."""
        handles = [handle for name in named.names(self.uid) if (handle := named.handle(name)) is not None]
        stopped = _stopped(named.agents(self.uid), epoch, keep=False)
        for handle in handles:
            ray.kill(handle, no_restart=True)
        for group in named.groups(self.uid):
            remove_placement_group(group)
        _wait_gone(self.uid)
        self.agents, self.lost = {}, set()
        return stopped

    def _find(self) -> None:
        """What an earlier controller left."""
        self.agents = named.agents(self.uid)
        self.lost = {name.split("/")[1] for name in named.held(self.uid)} - set(self.agents)

    def _hold(self, command: StartGang, order: Order) -> None:
        """Agents that know of the attempt, on all nodes of the placement; nothing on others. GangRefused: some can't be
        had."""
        slots = _by_node((*command.placement.slots, *command.placement.spares))
        begun = {
            node: agent.begin.remote(order.epoch, command.attempt, slots[node])
            for node, agent in self.agents.items()
            if node in slots
        }
        usable = {node for node, answer in begun.items() if _agreed(answer)}
        self._leave(set(self.agents) - usable, order.epoch)
        self._drop(self.lost - set(slots))
        lacking = self._reserve(command.placement.slots, order)
        if lacking:
            refused = GangRefused(f"node {lacking[0]} has no room for {len(slots[lacking[0]])} slots")
            refused.node = lacking[0]
            raise refused
        fresh = [node for node in _by_node(command.placement.slots) if node not in usable]
        calls = [self.agents[node].begin.remote(order.epoch, command.attempt, slots[node]) for node in fresh]
        ray.get(calls, timeout=ACTORS_READY_S)

    def _probe(self, nodes: Sequence[str], epoch: int, abandoned: Callable[[], bool]) -> None:
        """GangRefused names the nodes whose devices don't do what they should."""
        answers = {node: self.agents[node].probe.remote(epoch) for node in nodes}
        _wait(list(answers.values()), abandoned, PROBED_S)
        unsound = {node: found for node, answer in answers.items() if (found := ray.get(answer))}
        if unsound:
            refused = GangRefused("; ".join(f"node {node} did not pass its probe: {unsound[node]}" for node in unsound))
            refused.unsound = unsound
            raise refused

    def _reserve(self, slots: Sequence[Slot], order: Order) -> list[str]:
        """Agents where there are none so far. The nodes that have no room for one."""
        gpu, lacking = order.spec.resources.device == "gpu", []
        new = {node: indices for node, indices in _by_node(slots).items() if node not in self.agents}
        self._leave(self.lost & set(new), order.epoch)
        ids = {slot.name: slot.node for slot in slots}
        groups = {node: _group(self.uid, node, ids[node], len(indices), gpu) for node, indices in new.items()}
        deadline = time.monotonic() + GROUP_READY_S
        for node, group in groups.items():
            if not group.wait(max(0.1, deadline - time.monotonic())):
                remove_placement_group(group)
                lacking.append(node)
                continue
            number = len(new[node])
            self.agents[node] = NodeAgentActor.options(
                name=f"{self.uid}/{node}/agent", namespace=named.NAMESPACE, lifetime="detached",
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
                num_cpus=0 if gpu else number, num_gpus=number if gpu else 0,
            ).remote(
                order.epoch, self.uid, node, new[node], named.CONTROLLER, named.NAMESPACE,
                order.root, order.scratch, order.kernel_log, order.spec.runtime,
            )  # fmt: skip
        return lacking

    def _leave(self, nodes: set[str], epoch: int) -> None:
        """Free what is held on these nodes."""
        if not nodes:
            return
        _stopped({node: agent for node, agent in self.agents.items() if node in nodes}, epoch, keep=False)
        self._drop(nodes)
        _wait_gone(self.uid, nodes)
        self.agents = {node: agent for node, agent in self.agents.items() if node not in nodes}
        self.lost -= nodes

    def _drop(self, nodes: Container[str]) -> None:
        """What is on these nodes is to end; a node that is gone answers only once Ray knows that it is."""
        for name in named.names(self.uid):
            if name.split("/")[1] in nodes and (handle := named.handle(name)) is not None:
                ray.kill(handle, no_restart=True)
        for group in named.groups(self.uid, nodes):
            remove_placement_group(group)


def _skip(restored: Restored | None) -> tuple[int, int] | None:
    return None if restored is None or not restored.skip else (restored.step, restored.skip)


def standings(uid: str, epoch: int, timeout_s: float = 5.0) -> dict[str, Standing]:
    """What each agent of the job says of its ranks; agents that don't answer are missing."""
    answers = {node: agent.standing.remote(epoch) for node, agent in named.agents(uid).items()}
    found: dict[str, Standing] = {}
    for node, answer in answers.items():
        with contextlib.suppress(ray.exceptions.RayError):
            found[node] = ray.get(answer, timeout=timeout_s)
    return found


def _by_node(slots: Iterable[Slot]) -> dict[str, list[int]]:
    """Node name -> indices of its slots."""
    nodes: dict[str, set[int]] = {}
    for slot in slots:
        nodes.setdefault(slot.name, set()).add(slot.index)
    return {node: sorted(indices) for node, indices in nodes.items()}


def _ranks(slots: Sequence[Slot]) -> dict[str, list[tuple[int, int]]]:
    """Node name -> (slot, rank) of each of its ranks."""
    nodes: dict[str, list[tuple[int, int]]] = {}
    for rank, slot in enumerate(slots):
        nodes.setdefault(slot.name, []).append((slot.index, rank))
    return nodes


def _group(uid: str, node: str, node_id: str, slots: int, gpu: bool) -> PlacementGroup:
    return placement_group(
        [{"GPU": slots, "CPU": 1} if gpu else {"CPU": slots}],
        strategy="STRICT_PACK",
        name=f"{uid}/{node}",
        lifetime="detached",
        bundle_label_selector=[{"ray.io/node-id": node_id}],
    )


def _wait(calls: Sequence[Any], abandoned: Callable[[], bool], timeout_s: float = ACTORS_READY_S) -> None:
    """Until every call has answered; GangRefused when that takes too long or nobody wants it any more."""
    waiting, deadline = list(calls), time.monotonic() + timeout_s
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.2)
        ray.get(done)  # raises what a rank died of
        if abandoned():
            raise GangRefused("it was told to stop while it started")
        if time.monotonic() > deadline:
            raise GangRefused(f"{len(waiting)} of {len(calls)} nodes are not ready after {timeout_s:.0f} s")


def _agreed(answer: Any) -> bool:
    """Whether an agent is there and holds what it is to hold."""
    try:
        return bool(ray.get(answer, timeout=processes.KILL_S + 10))
    except ray.exceptions.RayTaskError:
        raise  # it is there, and can't do it
    except ray.exceptions.RayError:
        return False


def _stopped(agents: Mapping[str, Any], epoch: int, keep: bool) -> list[Stopped]:
    """Ask every agent to end its ranks. One that has died leaves its ranks to Ray, or had its node die under them.

    Raises ClusterError when one does not answer, or a process would not go.
    """
    answers = {node: agent.stop.remote(epoch, keep) for node, agent in agents.items()}
    stopped: list[Stopped] = []
    for node, answer in answers.items():
        try:
            stopped.append(ray.get(answer, timeout=processes.KILL_S + 10))
        except ray.exceptions.ActorDiedError:
            continue
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError) as error:
            raise ClusterError(f"the agent on node {node} does not answer: {type(error).__name__}") from error
    if left := [pid for answer in stopped for pid in answer.left]:
        raise ClusterError(f"processes {left} did not end by SIGKILL", hint="the node needs a reboot")
    return stopped


def _wait_gone(uid: str, nodes: Container[str] | None = None) -> None:
    deadline = time.monotonic() + STOP_S
    while held := [name for name in named.held(uid) if nodes is None or name.split("/")[1] in nodes]:
        if time.monotonic() > deadline:
            raise ClusterError(f"{held} of job {uid} were not removed in {STOP_S:.0f} s")
        time.sleep(0.02)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if isinstance(error, ray.exceptions.RayTaskError) and lines else (lines or [repr(error)])[0]
