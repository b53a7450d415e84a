"""Starts and ends gangs: a placement group a node, pinned to it, with one agent and the ranks in it. All or nothing.

Everything is detached and named after the job, so that whoever holds the lease can find it again: a gang outlives its
controller. Knows no job state; does what a command says, and what it leaves behind can be stopped by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from service.contracts.errors import ClusterError
from service.contracts.job import JobSpec
from service.core.commands import StartGang
from service.core.state import Slot
from service.runtime import processes
from service.runtime.node_agent import Member, NodeAgentActor, Standing, Stopped
from service.runtime.rank import RankActor
from service.runtime.recall import Tier
from workers.spec import Assignment, RunSpec

NAMESPACE = "phalanx"
CONTROLLER = "controller"
GROUP_READY_S = 10.0
ACTORS_READY_S = 110.0
STOP_S = 30.0


class GangRefused(ClusterError):
    """The slots of the placement could not be had."""

    code = "gang_refused"


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What a gang is started with, beside its command."""

    epoch: int
    spec: JobSpec
    root: str
    scratch: str
    addresses: dict[str, str]  # node id -> IP literal
    resume: tuple[str, ...]
    origin: tuple[str, str] | None = None  # (another job's folder, manifest), for a job without a checkpoint

    @property
    def token(self) -> str:
        return f"{self.epoch:x}"

    def run(self, command: StartGang) -> RunSpec:
        return self.spec.run(command.layout)


def start(
    command: StartGang, order: Order, abandoned: Callable[[], bool], memory: Callable[[], Tier | None] = lambda: None
) -> None:
    """Every rank has its process and its assignment. Raises GangRefused; `stop` then frees what is held.

    `memory` is asked once the processes are there, for what they find in it.
    """
    groups: dict[str, PlacementGroup] = {}
    try:
        by_node = _by_node(command.placement.slots)
        groups = {
            node: _group(command.uid, node, len(ranks), order.spec.resources.device) for node, ranks in by_node.items()
        }
        _wait_ready(groups.values())
        agents = {node: _agent(command, order, node, groups[node], ranks) for node, ranks in by_node.items()}
        actors = {
            rank: _rank(command, rank, groups[slot.node], agents[slot.node])
            for rank, slot in enumerate(command.placement.slots)
        }
        _wait([actor.ready.remote() for actor in actors.values()], abandoned)
        first = command.placement.slots[0].node
        host, port = ray.get(agents[first].host_store.remote(order.epoch, order.addresses[first]), timeout=30)
        tier = memory()
        ray.get([
            agents[node].start.remote(order.epoch, [
                Member(_assignment(command, order, rank, index, host, port), actors[rank])
                for index, rank in enumerate(ranks)
            ], tier.place(command.placement.slots[ranks[0]].name) if tier else None)
            for node, ranks in by_node.items()
        ], timeout=30)  # fmt: skip
    except (ray.exceptions.RayError, GangRefused, KeyError) as error:
        raise GangRefused(f"attempt {command.attempt} could not be started: {_first_line(error)}") from error


def stop(uid: str, epoch: int) -> list[Stopped]:
    """End all processes of the job and free its slots; safe to repeat. What the agents had left to say.

    Raises ClusterError when a process would not go.
    """
    handles = [handle for name in _names(uid) if (handle := _handle(name)) is not None]
    stopped = _stop_ranks(agents(uid), epoch)
    if left := [pid for answer in stopped for pid in answer.left]:
        raise ClusterError(f"processes {left} of job {uid} did not end by SIGKILL", hint="the node needs a reboot")
    for handle in handles:
        ray.kill(handle, no_restart=True)
    for group in _groups(uid):
        remove_placement_group(group)
    _wait_gone(uid)
    return stopped


def agents(uid: str) -> dict[str, Any]:
    """Node name -> agent of the job's gang, of those that Ray knows."""
    found = {name.split("/")[1]: _handle(name) for name in _names(uid) if name.endswith("/agent")}
    return {node: handle for node, handle in found.items() if handle is not None}


def standings(uid: str, epoch: int, timeout_s: float = 5.0) -> dict[str, Standing]:
    """What each agent of the job says of its ranks; agents that don't answer are missing."""
    answers = {node: agent.standing.remote(epoch) for node, agent in agents(uid).items()}
    found: dict[str, Standing] = {}
    for node, answer in answers.items():
        with contextlib.suppress(ray.exceptions.RayError):
            found[node] = ray.get(answer, timeout=timeout_s)
    return found


def jobs_held() -> set[str]:
    """Uids of all jobs that have an actor or a placement group on the cluster."""
    names = _names() + [row["name"] for row in _live_groups() if "/" in row["name"]]  # snapshots hold no slot
    return {name.split("/")[0] for name in names}


def _by_node(slots: Sequence[Slot]) -> dict[str, list[int]]:
    nodes: dict[str, list[int]] = {}
    for rank, slot in enumerate(slots):
        nodes.setdefault(slot.node, []).append(rank)
    return nodes


def _group(uid: str, node: str, slots: int, device: str) -> PlacementGroup:
    bundle = {"GPU": slots, "CPU": 1} if device == "gpu" else {"CPU": slots}
    return placement_group(
        [bundle],
        strategy="STRICT_PACK",
        name=f"{uid}/{node}",
        lifetime="detached",
        bundle_label_selector=[{"ray.io/node-id": node}],
    )


def _wait_ready(groups: Iterable[PlacementGroup]) -> None:
    deadline = time.monotonic() + GROUP_READY_S
    for group in groups:
        if not group.wait(max(0.1, deadline - time.monotonic())):
            table = placement_group_table(group)
            raise GangRefused(f"node {table['name'].split('/')[1][:8]} has no room for {table['bundles']}")


def _agent(command: StartGang, order: Order, node: str, group: PlacementGroup, ranks: Sequence[int]) -> Any:
    name = command.placement.slots[ranks[0]].name
    gpu = order.spec.resources.device == "gpu"
    return NodeAgentActor.options(
        name=f"{command.uid}/{name}/agent", namespace=NAMESPACE, lifetime="detached",
        scheduling_strategy=_inside(group), num_cpus=0 if gpu else len(ranks), num_gpus=len(ranks) if gpu else 0,
    ).remote(
        order.epoch, command.uid, command.attempt, name, CONTROLLER, NAMESPACE, order.root, order.scratch
    )  # fmt: skip


def _rank(command: StartGang, rank: int, group: PlacementGroup, agent: Any) -> Any:
    slot = command.placement.slots[rank]
    return RankActor.options(
        name=f"{command.uid}/{slot.name}/{slot.index}/{command.attempt}", namespace=NAMESPACE, lifetime="detached",
        scheduling_strategy=_inside(group),
    ).remote(rank, agent)  # fmt: skip


def _inside(group: PlacementGroup) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)


def _wait(calls: Sequence[Any], abandoned: Callable[[], bool]) -> None:
    """Until every call has answered; GangRefused when that takes too long or nobody wants it any more."""
    waiting, deadline = list(calls), time.monotonic() + ACTORS_READY_S
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.2)
        ray.get(done)  # raises what a rank died of
        if abandoned():
            raise GangRefused("it was told to stop while it started")
        if time.monotonic() > deadline:
            raise GangRefused(f"{len(waiting)} of {len(calls)} ranks did not come up in {ACTORS_READY_S:.0f} s")


def _assignment(command: StartGang, order: Order, rank: int, index: int, host: str, port: int) -> Assignment:
    """`index` counts the job's ranks of a node: a rank sees the job's devices there and no others."""
    return Assignment(
        job=command.uid, attempt=command.attempt, token=order.token, rank=rank, run=order.run(command), root=order.root,
        store_host=host, store_port=port, device=order.spec.resources.device,
        local_index=index, resume=order.resume, origin=order.origin,
    )  # fmt: skip


def _stop_ranks(agents: Mapping[str, Any], epoch: int) -> list[Stopped]:
    """Ask every agent to end its ranks. One that has died leaves its ranks to Ray, or had its node die under them."""
    answers = {node: agent.stop.remote(epoch) for node, agent in agents.items()}
    stopped: list[Stopped] = []
    for node, answer in answers.items():
        try:
            stopped.append(ray.get(answer, timeout=processes.KILL_S + 10))
        except ray.exceptions.ActorDiedError:
            continue
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError) as error:
            raise ClusterError(f"the agent on node {node} does not answer: {type(error).__name__}") from error
    return stopped


def _wait_gone(uid: str) -> None:
    deadline = time.monotonic() + STOP_S
    while held := [row["name"] for row in _live_groups() if row["name"].startswith(f"{uid}/")] + _names(uid):
        if time.monotonic() > deadline:
            raise ClusterError(f"{held} of job {uid} were not removed in {STOP_S:.0f} s")
        time.sleep(0.02)


def _groups(uid: str) -> list[PlacementGroup]:
    rows = [row for row in _live_groups() if row["name"].startswith(f"{uid}/")]
    return [PlacementGroup(ray.PlacementGroupID(bytes.fromhex(row["placement_group_id"]))) for row in rows]


def _live_groups() -> list[dict[str, Any]]:
    return [row for row in placement_group_table().values() if row["state"] != "REMOVED"]


def _names(uid: str = "") -> list[str]:
    """Names of the actors of the gang of one job, or of all jobs. Keepers of snapshots outlive gangs."""
    rows = ray.util.list_named_actors(all_namespaces=True)
    return [
        row["name"]
        for row in rows
        if row["namespace"] == NAMESPACE
        and row["name"].startswith(f"{uid}/" if uid else "")
        and "/" in row["name"]
        and not row["name"].endswith("/snapshots")
    ]


def _handle(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None  # gone since it was listed


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if isinstance(error, ray.exceptions.RayTaskError) and lines else (lines or [repr(error)])[0]
