"""What jobs have used, added up."""

from __future__ import annotations

import time

import pytest

from service.contracts.job import Phase
from service.contracts.status import JobStatus, Progress
from service.store.records import JobUpdate
from tests.api.commands import Run
from tests.api.world import World, job


def used(world: World, project: str, slot_s: float, slots: int = 0, ended: bool = True, **lost_slot_s: float) -> str:
    with world.client() as client:
        uid = client.submit(job(), project=project).uid
    now = time.time()
    status = JobStatus(
        progress=Progress(steps=20, tokens=1000),
        productive_s=5.0,
        slot_s=slot_s,
        slots=slots,
        slots_at=now - 36,
        lost_slot_s=lost_slot_s,
    )
    phase = Phase.SUCCEEDED if ended else Phase.RUNNING
    update = JobUpdate(uid, phase.value, "", status.model_dump(mode="json"), {}, now + 10 if ended else None)
    world.commit(jobs=[update])
    return uid


def test_slot_hours_tokens_and_cost_by_project_and_queue(world: World, run: Run) -> None:
    began = time.time()
    with world.client() as client:
        client.make_project("vision")
        used(world, "default", 7200.0, infrastructure=360.0, planned=36.0)
        used(world, "default", 3600.0, infrastructure=360.0, hang=72.0)
        used(world, "vision", 0.0, slots=100, ended=False)
        default, vision = client.usage(price=2.0)
        assert (default.project, default.queue, default.jobs, default.tokens) == ("default", "default", 2, 2000)
        assert default.slot_hours == pytest.approx(3.0)
        assert default.cost == pytest.approx(6.0)
        assert 0.2 < default.goodput <= 0.5
        assert default.lost_slot_hours == pytest.approx({"infrastructure": 0.2, "hang": 0.02, "planned": 0.01})
        assert vision.lost_slot_hours == {}
        assert vision.slot_hours == pytest.approx(1.0, rel=0.1)  # it still holds them
        assert client.usage(since=time.time() + 60) == ()
        assert [one.project for one in client.usage(since=began - 5)] == ["default", "vision"]
        own = client.make_token("x", "read", "vision").token
    with type(client)(world.url, own) as reader:
        assert [one.project for one in reader.usage()] == ["vision"]
    told = run("usage", "--days", "1").stdout
    assert "3.00" in told
    assert "0.23" in told
