"""What of a job's state is in memory: asks every keeper, finds the generations that are whole, and hands them to the
next attempt. Decides nothing but what is whole; without the memory tier an attempt begins at storage."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from service.contracts.cluster import Fleet, Node
from service.core import peers
from service.core.commands import StartGang
from service.core.state import Restored
from service.runtime import shelf, snapshots
from service.runtime.shelf import Elsewhere, Place
from service.runtime.snapshots import GENERATIONS, SNAPSHOTS, Kept, SnapshotsActor
from workers.checkpoint import manifest
from workers.checkpoint.manifest import Incomplete, Manifest
from workers.checkpoint.shards import Corrupt, ShardRecord
from workers.spec import RunSpec

log = logging.getLogger("phalanx.recall")

ANSWER_S = 10.0
BORN_S = 60.0  # that a new keeper may take to its first answer


@dataclasses.dataclass(frozen=True, slots=True)
class Tier:
    """The memory tier of one attempt."""

    root: str
    job: str
    namespace: str
    manifests: tuple[str, ...]
    nodes: Mapping[str, tuple[str, ...]]

    def place(self, node: str) -> Place:
        return Place(self.root, self.job, node, self.namespace, self.manifests, self.nodes)


def prepare(
    command: StartGang, fleet: Fleet, run: RunSpec, epoch: int, namespace: str, root: str, limit: int, above: int
) -> Tier | None:
    """Keepers on every node of the placement and its peers, and what they have of steps from `above` on.

    None where the tier can't be had; the attempt goes on without it.
    """
    try:
        return _prepare(command, fleet, run, epoch, namespace, root, limit, above)
    except (ray.exceptions.RayError, OSError) as error:
        log.warning("attempt %d of %s begins without the memory tier: %s", command.attempt, command.uid, error)
        return None


def keepers(job: str, namespace: str) -> dict[str, Any]:
    """Node name -> keeper, of those that Ray knows."""
    found = {}
    for row in ray.util.list_named_actors(all_namespaces=True):
        name = row["name"]
        if row["namespace"] == namespace and name.startswith(f"{job}/") and name.endswith("/snapshots"):
            with contextlib.suppress(ValueError):  # gone since it was listed
                found[name.split("/")[1]] = ray.get_actor(name, namespace=namespace)
    return found


def jobs_kept(namespace: str) -> set[str]:
    """Uids of all jobs that have a keeper somewhere."""
    rows = ray.util.list_named_actors(all_namespaces=True)
    names = [row["name"] for row in rows if row["namespace"] == namespace]
    return {name.split("/")[0] for name in names if name.endswith("/snapshots")}


def forget(job: str, epoch: int, namespace: str) -> None:
    """The job is over: its snapshots go, and who kept them. Safe to repeat."""
    known = keepers(job, namespace)
    _asked({node: keeper.end.remote(epoch) for node, keeper in known.items()}, ANSWER_S)
    for keeper in known.values():
        ray.kill(keeper, no_restart=True)


def clear(node: Node, root: str, alive: Collection[str]) -> bool:
    """Whether nothing of other jobs is left in this node's memory: a node that was given up comes back with what it
    had. RayError: it did not say."""
    there = NodeAffinitySchedulingStrategy(node.id, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(snapshots.clear)
    return not ray.get(task.remote(root, node.name, alive), timeout=ANSWER_S)


def whole(kept: Sequence[Kept], above: int, restored: Restored | None = None) -> list[tuple[str, list[Kept]]]:
    """(folder, one copy of each shard) of the generations of which every rank's shard is there, the newest first.

    None below step `above`, none that a rollback went back from, and none that `restored` bars.
    """
    generations: dict[str, dict[int, Kept]] = {}
    for one in kept:
        generations.setdefault(one.folder, {}).setdefault(one.record.rank, one)
    found: list[tuple[str, list[Kept]]] = []
    for folder in sorted(generations, key=manifest.generation, reverse=True):
        parts = generations[folder]
        attempt, _, step = manifest.generation(folder)
        if restored is not None and restored.bars(step, attempt):
            continue
        if step < above or set(parts) != set(range(parts[min(parts)].world)):
            continue
        if found and step >= manifest.generation(found[-1][0])[2]:
            continue
        found.append((folder, [parts[rank] for rank in sorted(parts)]))
    return found[:GENERATIONS]


def _prepare(
    command: StartGang, fleet: Fleet, run: RunSpec, epoch: int, namespace: str, root: str, limit: int, above: int
) -> Tier:
    job, nodes_by_id = command.uid, {node.id: node for node in fleet.nodes}
    chosen = peers.choose(command.layout, command.placement, fleet)
    there = {node.name for node in fleet.nodes}
    known = {node: keeper for node, keeper in keepers(job, namespace).items() if node in there}
    gang = {slot.node: slot.name for slot in command.placement.slots}
    wanted = gang | {peer: nodes_by_id[peer].name for peer in chosen.values()}
    for node, name in wanted.items():
        if name not in known:
            known[name] = _keeper(epoch, job, nodes_by_id[node], namespace, root, limit)
    answers = _asked({node: keeper.kept.remote() for node, keeper in known.items()}, BORN_S)
    kept = [one for said in answers.values() for one in said]
    nodes = shelf.nodes_of(kept)
    found = whole(kept, above, command.restored)
    peer_of = {gang[own]: known[nodes_by_id[peer].name] for own, peer in chosen.items()}
    keep = [folder for folder, _ in found]
    begun = _asked({node: known[node].begin.remote(epoch, peer_of.get(node), keep) for node in answers}, ANSWER_S)
    manifests = []
    for folder, parts in found:
        with _unless_lost(folder):
            document = _assembled(Elsewhere(job, namespace, nodes), job, run, parts)
            data = ray.put(manifest.encode(document))
            told = {node: known[node].publish.remote(document.path, data) for node in gang.values() if node in begun}
            if len(_asked(told, ANSWER_S)) == len(gang):
                manifests.append(document.path)
    return Tier(root, job, namespace, tuple(manifests), nodes)


def _assembled(elsewhere: Elsewhere, job: str, run: RunSpec, parts: Sequence[Kept]) -> Manifest:
    """The manifest of one whole generation, every index of it read and checked."""
    first = parts[0].record
    attempt, _, step = manifest.generation(parts[0].folder)
    return manifest.assemble(
        elsewhere, job=job, step=step, attempt=attempt, token=manifest.token_of(first.index), layout={},
        model=run.model.model_dump(), header=first.header, created_at=time.time(),
        records=[ShardRecord(one.record.index, one.record.index_digest, one.record.nbytes) for one in parts],
    )  # fmt: skip


@contextlib.contextmanager
def _unless_lost(folder: str) -> Iterator[None]:
    """A generation that can't be read is none: an older one, or storage, has to do."""
    try:
        yield
    except (Corrupt, Incomplete, OSError) as error:
        log.warning("the snapshot in %s is passed over: %s", folder, error)


def _keeper(epoch: int, job: str, node: Node, namespace: str, root: str, limit: int) -> Any:
    return SnapshotsActor.options(
        name=SNAPSHOTS.format(job=job, node=node.name), namespace=namespace, lifetime="detached", get_if_exists=True,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
    ).remote(epoch, job, node.name, root, limit, node.address)  # fmt: skip


def _asked(questions: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """The answers that come in time, by node."""
    done, _ = (
        ray.wait(list(questions.values()), num_returns=len(questions), timeout=timeout_s) if questions else ([], [])
    )
    answers = {}
    for node, question in questions.items():
        if question in done:
            with contextlib.suppress(ray.exceptions.RayError):
                answers[node] = ray.get(question)
    return answers
