"""Checkpoints looked after while a job trains, and after it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.contracts.job import Phase
from tests.e2e.world import HALF, World, until

pytestmark = [pytest.mark.ray, pytest.mark.torch]


def test_verify_restore_export_and_fork(world: World, tmp_path: Path) -> None:
    client = world.client
    uid = world.submit(train={"steps": 2000, "horizon": 2000}, checkpoint={"every_steps": 5, "keep": 1000}, **HALF)
    world.saved(uid, 20)
    good = [row for row in client.checkpoints(uid) if row.rejected is None]
    assert client.answer(uid, client.verify(uid, good[-1].step)).type == "CheckpointVerified"

    target = good[1].step  # not the newest
    client.restore(uid, target)
    until(lambda: client.get(uid).status.attempt == 2 and client.get(uid).phase is Phase.RUNNING, "second attempt")
    view = client.get(uid)
    assert not view.status.incidents
    resumed = [event.reason for event in client.events(uid) if event.type == "GangResumed"]
    assert f"continues after step {target} from" in resumed[-1]
    undone = {row.step: row.rejected for row in client.checkpoints(uid) if row.attempt == 1 and row.step > target}
    assert undone
    assert set(undone.values()) == {f"restored to step {target} by request"}

    world.saved(uid, target + 5)
    folder = f"{world.fleet.home}/runs/exports/{uid}"
    assert client.answer(uid, client.export(uid, folder, dtype="bfloat16")).type == "CheckpointExported"
    assert {"config.json", "model.safetensors"} <= {path.name for path in Path(folder).iterdir()}

    client.cancel(uid)
    world.phase(uid, Phase.CANCELLED)
    newest = next(row.step for row in client.checkpoints(uid) if row.rejected is None)
    child = client.fork(uid, overrides={"name": "child", "train": {"steps": newest + 3}}).uid
    world.jobs.append(child)
    world.finish(child)
    assert list(world.losses(child)) == [newest + 1, newest + 2, newest + 3]

    (shard, *_) = Path(f"{client.get(child).storage}/checkpoints").rglob("*.bin")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    verdict = client.answer(child, client.verify(child, newest + 3))
    assert verdict.type == "CheckpointRejected"
    assert shard.name in verdict.reason
    assert "checksum" in verdict.reason
