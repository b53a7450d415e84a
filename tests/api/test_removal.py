"""A job that is over is forgotten, with what it has in storage where that is wanted."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from service.contracts import errors
from service.contracts.job import Phase
from service.store.records import Changes, CheckpointRow, LogChunk, MetricRow
from tests.api.world import World, job


def over(world: World) -> str:
    uid = world.submit({"labels": {"team": "gone"}}).uid
    world.say(uid, "one")
    world.log(uid, "logs/1.jsonl", [(0, "a")])
    world.checkpoint(uid, 5)
    world.commit(metrics=[MetricRow(uid, 1, 1, 1.0, {"loss": 1.0})])
    world.move(uid, Phase.SUCCEEDED)
    return uid


@pytest.mark.parametrize("data", [False, True])
def test_what_is_forgotten_is_nowhere(http: httpx.Client, world: World, data: bool) -> None:
    uid, other = over(world), over(world)
    with world.client() as client:
        client.remove(uid, data)
        with pytest.raises(errors.NotFound):
            client.get(uid)
        assert uid not in {one.uid for one in client.list(labels={"team": "gone"})}
        assert client.get(other).uid == other
    for path in ("", "/events", "/logs", "/metrics", "/checkpoints", "/ranks"):
        assert http.get(f"/v1/jobs/{uid}{path}").status_code == 404
    assert Path(world.root, uid).exists() is not data
    assert Path(world.root, other).exists()
    assert http.delete(f"/v1/jobs/{uid}").status_code == 404


@pytest.mark.parametrize("phase", [phase for phase in Phase if not phase.terminal])
def test_what_goes_on_is_not_forgotten(http: httpx.Client, world: World, phase: Phase) -> None:
    uid = world.submit().uid
    world.move(uid, phase)
    answer = http.delete(f"/v1/jobs/{uid}")
    assert (answer.status_code, answer.json()["reason"]) == (409, "conflict")
    assert world.store.job(uid).uid == uid


def test_a_job_at_whose_checkpoint_another_begins_stays(world: World) -> None:
    uid = over(world)
    with world.client() as client:
        child = client.submit(job({"init_from": {"job": uid}})).uid
        with pytest.raises(errors.Conflict, match=f"job {child} begins at a checkpoint of job {uid}"):
            client.remove(uid)
        world.move(child, Phase.CANCELLED)
        client.remove(uid)


def test_something_that_is_still_asked_of_it_is_answered_first(world: World) -> None:
    uid = over(world)
    with world.client() as client:
        client.verify(uid, 5)
        with pytest.raises(errors.Conflict, match="still asked"):
            client.remove(uid)


def test_what_is_told_of_it_later_is_dropped(world: World) -> None:
    uid, other = over(world), over(world)
    with world.client() as client:
        client.remove(uid)
    told = [(one, 2.0, "CheckpointVerified", "late", {}) for one in (uid, other)]
    world.store.commit(
        world.epoch or 0,
        Changes(
            events=told,
            metrics=[MetricRow(uid, 2, 1, 2.0, {"loss": 1.0})],
            log_chunks=[LogChunk(uid, 1, "n1", "late.jsonl", 1, 2.0)],
            checkpoints=[CheckpointRow(uid, 5, 1, "m", 2.0)],
        ),
    )
    assert [event.reason for event in world.store.events(other, 0)][-1] == "late"
    assert world.store.events(uid, 0) == []
