"""What a user wants of a job that is there: left for the controller once, refused where it makes no sense."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from api import jobview
from service.contracts import errors
from service.contracts.job import Phase
from tests.api.world import World, job

TERMINAL = [phase for phase in Phase if phase.terminal]
ENDING = [Phase.FINISHING, Phase.CANCELLING]
VERBS = ["cancel", "suspend", "resume", "checkpoint", "restart"]


def brought(world: World, phase: Phase) -> str:
    uid = world.submit().uid
    if phase is not Phase.QUEUED:
        world.move(uid, phase)
    return uid


def test_a_job_is_suspended_and_goes_on_once_each(world: World) -> None:
    uid = brought(world, Phase.RUNNING)
    with world.client() as client:
        assert client.get(uid).desired == "running"
        assert [client.suspend(uid).desired for _ in range(2)] == ["suspended", "suspended"]
        world.move(uid, Phase.SUSPENDED)
        assert [client.resume(uid).desired for _ in range(2)] == ["running", "running"]
        world.move(uid, Phase.QUEUED)
        with pytest.raises(errors.Conflict, match="was not suspended: its phase is queued"):
            client.resume(uid)
    assert world.intents(uid) == [("suspend", {}), ("resume", {})]


@pytest.mark.parametrize(("verb", "kind"), [("checkpoint", "save"), ("restart", "restart")])
def test_what_needs_steps_is_asked_of_a_running_job_only(
    http: httpx.Client, world: World, verb: str, kind: str
) -> None:
    for phase in (phase for phase in Phase if phase is not Phase.RUNNING):
        uid = brought(world, phase)
        answer = http.post(f"/v1/jobs/{uid}:{verb}")
        assert (answer.status_code, answer.json()["reason"]) == (409, "conflict"), phase
        assert f"its phase is {phase}" in answer.json()["detail"]
        assert world.intents(uid) == []
    uid = brought(world, Phase.RUNNING)
    for _ in range(2):
        assert http.post(f"/v1/jobs/{uid}:{verb}").status_code == 202
    assert world.intents(uid) == [(kind, {})]


def test_a_restart_may_go_back_and_leave_samples_out(http: httpx.Client, world: World) -> None:
    uid = brought(world, Phase.RUNNING)
    path = world.checkpoint(uid, 5)
    with world.client() as client:
        assert client.restart(uid, 5, 64).uid == uid
        with pytest.raises(errors.NotFound, match="no checkpoint of step 7"):
            client.restart(uid, 7)
        assert client.restart(uid, skip_samples=32).uid == uid  # the newest
    named = {"step": 5, "attempt": 1, "manifest": path}
    assert world.intents(uid) == [("restore", {**named, "skip_samples": skip}) for skip in (64, 32)]
    assert http.post(f"/v1/jobs/{uid}:restart", json={"skip_samples": -1}).status_code == 422


@pytest.mark.parametrize("phase", [*TERMINAL, *ENDING])
@pytest.mark.parametrize("verb", ["suspend", "resume"])
def test_s13_what_ends_neither_waits_nor_goes_on(http: httpx.Client, world: World, verb: str, phase: Phase) -> None:
    uid = brought(world, phase)
    answer = http.post(f"/v1/jobs/{uid}:{verb}")
    assert (answer.status_code, answer.json()["reason"]) == (409, "conflict")
    assert f"its phase is {phase}" in answer.json()["detail"]


def test_a_graceful_cancel_may_be_followed_by_one_at_once(world: World) -> None:
    uid = brought(world, Phase.RUNNING)
    with world.client() as client:
        for graceful in (True, True, False, False, True):
            assert client.cancel(uid, graceful).desired == "cancelled"
    assert world.intents(uid) == [("cancel", {"graceful": True}), ("cancel", {"graceful": False})]


@pytest.mark.parametrize("verb", VERBS)
def test_nobody_and_others_have_none(http: httpx.Client, verb: str) -> None:
    assert http.post(f"/v1/jobs/nobody-0:{verb}").status_code == 404


def test_a_change_is_of_what_was_read(http: httpx.Client, world: World) -> None:
    uid = world.submit({"labels": {"team": "a"}}).uid
    tag = http.get(f"/v1/jobs/{uid}").headers["ETag"]
    body = {"priority": 7, "labels": {"team": "b"}, "checkpoint": {"keep": 5}, "budgets": {"user_error": 0}}
    answer = http.patch(f"/v1/jobs/{uid}", json=body, headers={"If-Match": tag})
    made = answer.json()
    assert (answer.status_code, made["generation"], made["spec"]["priority"]) == (200, 2, 7)
    assert answer.headers["ETag"] not in (tag, "")
    assert (made["spec"]["checkpoint"]["keep"], made["spec"]["train"]["steps"]) == (5, 20)
    ((kind, data),) = world.intents(uid)
    assert (kind, data["generation"], data["spec"]) == ("change", 2, made["spec"])
    with world.client() as client:
        assert uid in {one.uid for one in client.list(labels={"team": "b"})}
        assert uid not in {one.uid for one in client.list(labels={"team": "a"})}
    again = http.patch(f"/v1/jobs/{uid}", json={"priority": 8}, headers={"If-Match": tag})
    assert (again.status_code, again.json()["reason"]) == (412, "changed")
    assert answer.headers["ETag"] in again.json()["hint"]
    assert len(world.intents(uid)) == 1


def test_a_change_without_what_was_read_is_none(http: httpx.Client, world: World) -> None:
    uid = world.submit().uid
    answer = http.patch(f"/v1/jobs/{uid}", json={"priority": 7})
    assert (answer.status_code, answer.json()["field"]) == (428, "If-Match")
    assert 'If-Match: "1"' in answer.json()["hint"]


def test_two_changes_at_once_are_one_and_a_refusal(world: World) -> None:
    uid = world.submit().uid
    spec = world.store.job(uid).spec
    world.store.change(uid, 1, {**spec, "priority": 1}, 1.0)
    with pytest.raises(errors.Changed, match="is of generation 2, not 1"):
        world.store.change(uid, 1, {**spec, "priority": 2}, 1.0)
    assert jobview.tag(world.store.job(uid)) == '"2"'


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"train": {"steps": 5}}, "train", "can't be changed"),
        ({"name": "other"}, "name", "can't be changed"),
        ({"resources": {"slots": 8}}, "resources.slots", "can't be changed"),
        ({"resources": None}, "resources", "can't be changed"),
        ({"checkpoint": {"root": "/elsewhere"}}, "checkpoint.root", "can't be changed"),
        ({"colour": 1}, "colour", "can't be changed"),
        ({"priority": 5000}, "priority", "less than or equal to 1000"),
        ({"queue": "nowhere"}, "queue", "there is no queue nowhere"),
        ({"resources": {"elastic": {"min_slots": 8}}}, "resources", "outside elastic"),
        ({"labels": {"a b": "c"}}, "labels", "match pattern"),
    ],
)
def test_what_can_not_be_changed(http: httpx.Client, world: World, body: dict[str, Any], field: str, says: str) -> None:
    uid = world.submit().uid
    answer = http.patch(f"/v1/jobs/{uid}", json=body, headers={"If-Match": "*"})
    assert answer.status_code == 422
    assert answer.json()["field"].startswith(field)
    assert says in answer.json()["detail"]
    assert (world.store.job(uid).generation, world.intents(uid)) == (1, [])


@pytest.mark.parametrize("phase", TERMINAL)
def test_what_is_over_stays_as_it_was(world: World, phase: Phase) -> None:
    uid = brought(world, phase)
    with world.client() as client, pytest.raises(errors.Conflict, match=f"its phase is {phase}"):
        client.change(uid, {"priority": 1})


def test_queues(world: World) -> None:
    with world.client() as client:
        assert [(one.name, one.priority) for one in client.queues()] == [("default", 0)]
        with pytest.raises(errors.UserError, match="there is no queue urgent") as refused:
            client.submit(job({"queue": "urgent"}))
        assert "use default" in refused.value.hint
        client.make_queue("urgent", 10)
        with pytest.raises(errors.Conflict, match="a queue urgent already"):
            client.make_queue("urgent")
        assert client.submit(job({"queue": "urgent"})).spec["queue"] == "urgent"
        client.make_queue("night", -5)
        client.set_priority("urgent", 3)
        assert [(one.name, one.priority) for one in client.queues()] == [("urgent", 3), ("default", 0), ("night", -5)]
        with pytest.raises(errors.NotFound):
            client.set_priority("nothing", 1)
        client.make_project("vision", 4)
    assert world.store.access.shares() == ({"default": 0, "urgent": 3, "night": -5}, {"vision": 4})
