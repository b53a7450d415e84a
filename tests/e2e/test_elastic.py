"""Smaller, not stopped: what standbys and fewer replicas make of a dead rank, a lost node, a rank that hangs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from service.contracts.job import Phase
from service.contracts.status import JobView
from tests.e2e.world import World, until

pytestmark = [pytest.mark.ray, pytest.mark.torch]

EVERY_STEP = {"every_steps": 1000, "snapshot_every": 1}
REPLICAS: dict[str, Any] = {
    "parallel": {"dp": 4, "pp": 1, "tp": 2},
    "train": {"steps": 400, "horizon": 400, "global_batch": 12, "precision": "float64"},
}


def ready(world: World, uid: str, count: int = 8) -> JobView:
    """The job once a warm process stands behind each of its ranks."""

    def there() -> JobView | None:
        view = world.client.get(uid)
        return view if view.status.standbys >= count else None

    return until(there, f"{count} warm standbys of {uid}", 180.0)


def grown(world: World, uid: str, world_size: int) -> JobView:
    def there() -> JobView | None:
        view = world.client.get(uid)
        layout = view.status.layout
        return view if view.phase is Phase.RUNNING and layout is not None and layout.world == world_size else None

    return until(there, f"{uid} on {world_size} slots", 120.0)


def back(world: World, node: str) -> None:
    number = int(node.removeprefix("n"))
    world.fleet.join(node, f"r{number // 2}", f"127.0.77.{number + 2}")


def moved(world: World, uid: str) -> list[Any]:
    return [incident for incident in world.client.get(uid).status.incidents if incident.recover_s is not None]


def test_f1_a_standby_takes_the_place_of_a_killed_rank_and_f2_a_stopped_one_is_named_with_the_stacks_of_all(
    world: World,
) -> None:
    uid = world.submit(train={"steps": 2000}, resources={"standbys": True}, checkpoint=EVERY_STEP)
    ready(world, uid)
    world.kill(uid, attempt=1, rank=3)
    (killed,) = until(lambda: moved(world, uid), "recovery")
    assert (killed.kind, killed.rank, killed.tier) == ("process_died", 3, "memory")
    assert killed.steps_redone <= 2
    assert killed.start_s < 5.0  # nobody was started: a cold start of eight ranks takes longer than that
    assert killed.recover_s < 20.0

    ready(world, uid)
    (pid,) = world.pids(uid, attempt=2, rank=5)
    os.kill(pid, signal.SIGSTOP)
    _, stopped = until(lambda: (all_of := moved(world, uid)) and len(all_of) == 2 and all_of, "recovery", 120.0)
    assert (stopped.kind, stopped.rank) == ("hang", 5)
    _, opened = [event for event in world.client.events(uid) if event.type == "IncidentOpened"]
    stacks = opened.data["faults"][0]["traceback"]
    assert stacks.startswith(f"rank 5 on {stopped.node}: stopped")
    assert "workers/trainer.py" in stacks
    until(lambda: not Path(f"/proc/{pid}").exists(), "end of the stopped process")


def test_f3_a_lost_node_makes_it_smaller_and_its_return_larger(world: World) -> None:
    uid = world.submit(**REPLICAS, resources={"standbys": True, "elastic": {"min_slots": 4}}, checkpoint=EVERY_STEP)
    before = ready(world, uid)
    lost = before.status.placement[-1].node
    world.fleet.lose(lost)
    smaller = grown(world, uid, 6)
    assert lost not in {place.node for place in smaller.status.placement}
    (incident,) = until(lambda: moved(world, uid), "recovery")
    assert (incident.kind, incident.node, incident.tier) == ("node_lost", lost, "memory")
    assert (incident.layout_before.dp, incident.layout_after.dp, incident.layout_after.tp) == (4, 3, 2)
    assert incident.recover_s < 20.0
    back(world, lost)
    grown(world, uid, 8)
    until(lambda: len(moved(world, uid)) == 2, "growth")
    _, growth = moved(world, uid)
    assert (growth.kind, growth.cause, growth.steps_redone) == ("rescale", None, 0)
    told = until(
        lambda: (now := world.client.ranks(uid)).ranks and all(one.parts for one in now.ranks) and now, "parts"
    )
    assert {name for one in told.ranks for name in one.parts} >= {"data", "forward_backward", "optimizer"}
    losses = world.losses(uid)
    assert sorted(losses) == list(range(1, max(losses) + 1))
