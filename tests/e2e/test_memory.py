"""Back from memory: no step is lost that a snapshot has, and storage does for what no memory has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service import roster
from tests.e2e.world import HALF, World, until

pytestmark = [pytest.mark.ray, pytest.mark.torch]

EVERY_STEP = {"every_steps": 1000, "snapshot_every": 1}  # nothing in storage before the end


def resumed(world: World, uid: str) -> list[tuple[int, str]]:
    """(step, source) of each attempt's beginning."""
    sentences = [event.reason for event in world.client.events(uid) if event.type == "GangResumed"]
    return [(int(found[1]), found[2]) for one in sentences if (found := re.search(r"after step (\d+) from (.*)", one))]


def test_a_killed_rank_and_a_lost_node_cost_hardly_a_step(world: World) -> None:
    uid = world.submit(train={"steps": 90}, checkpoint=EVERY_STEP, **HALF)
    world.kill(uid, attempt=1, rank=1, after=10)
    until(lambda: len(resumed(world, uid)) == 2, "second attempt")
    view = world.reach(uid, world.client.get(uid).status.progress.step + 10)
    assert view.status.snapshot_bytes > 0
    places = {place.node for place in view.status.placement}
    lost = sorted(places)[0]
    folder = Path(roster.memory(world.fleet.temp))
    assert list((folder / lost / uid).rglob("*.bin"))
    world.fleet.lose(lost)
    assert not (folder / lost).exists()
    view = world.finish(uid)
    number = int(lost.removeprefix("n"))
    world.fleet.join(lost, f"r{number // 2}", f"127.0.77.{number + 2}")

    assert [incident.kind for incident in view.status.incidents] == ["process_died", "node_lost"]
    assert all(incident.steps_redone <= 2 for incident in view.status.incidents)  # one snapshot may be under way
    (_, first), second, third = resumed(world, uid)
    assert (first, second[1], third[1]) == ("the seed", "memory", "memory")
    assert 8 <= second[0] < third[0]
    assert list(world.losses(uid)) == list(range(1, 91))
    until(lambda: not list(folder.glob(f"*/{uid}")), "end of its snapshots")
