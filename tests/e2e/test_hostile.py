"""Storage that fails, bytes that rot, an API that is killed: the job goes on, and says what happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from service.contracts.errors import ClusterError
from service.contracts.job import Phase
from tests.e2e.world import HALF, World, until

pytestmark = [pytest.mark.ray, pytest.mark.torch]


def test_the_api_and_the_controllers_keeper_come_back(world: World) -> None:
    """At the same address: a client that waits does not notice."""
    kept, nodes = world.fleet.keeper, len(world.client.nodes())
    before = {name: kept.pid(name) for name in ("api", "service")}
    for pid in before.values():
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    uid = until(lambda: _submitted(world), "API")
    assert len(world.client.nodes()) == nodes
    assert all(kept.pid(name) not in (None, pid) for name, pid in before.items())
    world.client.cancel(uid)
    world.phase(uid, Phase.CANCELLED)


def _submitted(world: World) -> str:
    one = {"parallel": {"dp": 1, "pp": 1, "tp": 1}, "resources": {"slots": 1}}
    try:
        return world.submit(name="after", **one)
    except ClusterError:
        return ""


def test_a_checkpoint_that_cannot_be_written_and_one_that_rots(world: World) -> None:
    uid = world.submit(name="storage", train={"steps": 64}, checkpoint={"snapshot_every": 0}, **HALF)
    storage = Path(world.client.get(uid).storage)
    world.saved(uid, 8)
    (storage / "checkpoints").rename(storage / "away")
    (storage / "checkpoints").write_text("a file")
    until(lambda: "SaveFailed" in world.events(uid), "event of the save that failed")
    (storage / "checkpoints").unlink()
    (storage / "away").rename(storage / "checkpoints")
    world.saved(uid, 24)
    world.kill(uid, attempt=1, rank=3)
    until(lambda: world.client.get(uid).status.attempt == 2, "second attempt")
    step, before = world.saved(uid, 24), world.losses(uid)
    _flip_a_bit(storage / "checkpoints" / f"{step:010d}")  # the new ranks have not begun to load
    until(lambda: world.events(uid).count("GangResumed") == 2, "second start")
    view = world.finish(uid)

    losses = world.losses(uid)
    assert list(losses) == list(range(1, 65))
    assert {step: losses[step] for step in before} == before  # the steps redone from the older checkpoint too
    told = {event.type: event.reason for event in world.client.events(uid)}
    assert f"{step:010d}" in told["CheckpointRejected"]
    assert "continues after step" in told["GangResumed"]
    assert f"after step {step} " not in told["GangResumed"]
    assert view.status.attempt == 2
    assert view.status.checkpoint_step == 64


def _flip_a_bit(folder: Path) -> None:
    shard = max(folder.rglob("*.bin"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
