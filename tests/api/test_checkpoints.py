"""Checkpoints over REST: what is told of them, and what may be asked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from api import patch
from service.contracts import errors
from service.contracts.job import Phase
from service.store.records import CheckpointRow
from tests.api.world import World, job
from workers.checkpoint import manifest

ENDING = (Phase.FINISHING, Phase.CANCELLING)
RUNNING = [phase for phase in Phase if not phase.terminal and phase not in ENDING]


@pytest.fixture(scope="module")
def uid(world: World) -> str:
    """A job with good checkpoints of steps 5, 10 and 15, of two attempts at step 10, a bad one, and a removed one."""
    made = world.submit({"train.steps": 40}).uid
    world.checkpoint(made, 5)
    world.checkpoint(made, 10)
    world.checkpoint(made, 10, attempt=2)
    world.checkpoint(made, 15, attempt=2)
    world.checkpoint(made, 20, attempt=2, rejected="block 3 fails its checksum")
    world.commit(checkpoints=[CheckpointRow(made, 1, 1, manifest.path(1, 1), 1.0)])
    return made


def asked(http: httpx.Client, uid: str, path: str, **given: Any) -> httpx.Response:
    return http.post(f"/v1/jobs/{uid}{path}", **given)


def test_the_list_tells_what_became_of_each(world: World, uid: str) -> None:
    world.commit(checkpoints=[CheckpointRow(uid, 5, 1, manifest.path(5, 1), 9.0, verified_at=9.0)])
    with world.client() as client:
        found = client.checkpoints(uid)
    assert [(one.step, one.attempt, one.rejected, one.verified_at, one.stored, one.good) for one in found] == [
        (20, 2, "block 3 fails its checksum", None, True, False),
        (15, 2, None, None, True, True),
        (10, 2, None, None, True, True),
        (10, 1, None, None, True, True),
        (5, 1, None, 9.0, True, True),
        (1, 1, None, None, False, False),
    ]
    assert {one.nbytes for one in found} == {80, None}


def test_where_storage_is_away_the_list_goes_on_and_what_needs_it_says_so(http: httpx.Client, world: World) -> None:
    away = world.submit().uid
    path = world.checkpoint(away, 5)
    shutil.move(Path(world.root, away), Path(world.root, f"{away}.moved"))
    Path(world.root, away).write_text("a file")
    (one,) = http.get(f"/v1/jobs/{away}/checkpoints").json()["checkpoints"]
    assert (one["manifest"], one["stored"]) == (path, None)
    for answer in (http.get(f"/v1/jobs/{away}/checkpoints/5"), asked(http, away, "/checkpoints/5:verify")):
        assert (answer.status_code, answer.json()["reason"]) == (503, "cluster")
        assert away in answer.json()["detail"]


@pytest.mark.parametrize(
    ("step", "attempt", "found"),
    [
        ("newest", None, (15, 2)),
        ("newest", 1, (10, 1)),
        ("10", None, (10, 2)),
        ("10", 1, (10, 1)),
        ("0010", None, (10, 2)),
        ("20", None, (20, 2)),  # also one that is never used again
    ],
)
def test_what_is_in_one(http: httpx.Client, uid: str, step: str, attempt: int | None, found: tuple[int, int]) -> None:
    query = {} if attempt is None else {"attempt": attempt}
    shown = http.get(f"/v1/jobs/{uid}/checkpoints/{step}", params=query).json()
    assert (shown["checkpoint"]["step"], shown["checkpoint"]["attempt"]) == found
    assert (shown["job"], shown["layout"]["dp"], shown["model"]["layers"]) == (uid, 1, 4)
    assert (shown["tensors"], shown["elements"], shown["parameters"], shown["shards"]) == (2, 32, 16, 1)
    assert (shown["samples"], shown["optimizer"]) == (8 * found[0], {"name": "adamw", "steps": found[0]})
    assert shown["ledger"] == [{"attempt": found[1], "start": 0, "end": 8 * found[0]}]


GOOD = "good ones are of step 15, 10, 5"
ACTIONS = [(":verify", {}), (":restore", {}), (":export", {"json": {"to": "ROOT/out"}})]


@pytest.mark.parametrize(("action", "given"), ACTIONS)
@pytest.mark.parametrize(
    ("step", "status", "says", "hint"),
    [
        ("7", 404, "has no checkpoint of step 7", GOOD),
        ("1", 404, "any more: it was removed", GOOD),
        ("20", 409, "is never used again: block 3 fails its checksum", GOOD),
        ("10?attempt=3", 404, "no checkpoint of step 10 by attempt 3", GOOD),
        ("-1", 422, "pattern", ""),
        ("ten", 422, "pattern", ""),
        ("9999999999999999", 422, "pattern", ""),
        ("999999999999999", 404, "has no checkpoint of step 999999999999999", GOOD),
        ("٣", 422, "pattern", ""),
        ("10?attempt=-1", 422, "greater than or equal to 0", ""),
        ("10?attempt=x", 422, "valid integer", ""),
    ],
)
def test_what_can_not_be_used_is_told_with_what_can(
    http: httpx.Client, world: World, uid: str, action: str, given: dict[str, Any], step: str, status: int, says: str,
    hint: str,
) -> None:  # fmt: skip
    body = {"json": {"to": f"{world.root}/out"}} if given else {}
    name, _, query = step.partition("?")
    answer = asked(http, uid, f"/checkpoints/{name}{action}{'?' if query else ''}{query}", **body)
    assert (answer.status_code, answer.headers["Content-Type"]) == (status, "application/problem+json")
    assert says in answer.json()["detail"]
    assert hint in answer.json()["hint"]
    assert world.intents(uid) == []


@pytest.mark.parametrize("path", ["/checkpoints/5", "/checkpoints"])
def test_an_unknown_job(http: httpx.Client, path: str) -> None:
    assert http.get(f"/v1/jobs/nobody-00000000{path}").status_code == 404
    for action in (":verify", ":restore", ":export"):
        answer = asked(http, "nobody-00000000", f"/checkpoints/5{action}", json={"to": "/x"})
        assert (answer.status_code, answer.json()["reason"]) == (404, "not_found")
    assert asked(http, "nobody-00000000", ":fork").status_code == 404


def test_a_job_without_a_checkpoint_says_so(http: httpx.Client, world: World) -> None:
    empty = world.submit().uid
    answer = asked(http, empty, "/checkpoints/newest:verify")
    assert (answer.status_code, answer.json()["hint"]) == (404, "it has no good checkpoint yet")
    assert http.get(f"/v1/jobs/{empty}/checkpoints/newest").status_code == 404


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.SUCCEEDED])
def test_verify_is_one_intent_and_its_answer_an_event(http: httpx.Client, world: World, phase: Phase) -> None:
    mine = world.submit().uid
    path = world.checkpoint(mine, 5)
    world.move(mine, phase)
    with world.client() as client:
        first = client.verify(mine)
        assert client.verify(mine, 5) == first
        assert world.intents(mine) == [("verify", {"step": 5, "attempt": 1, "manifest": path})]
        world.commit(
            events=[
                (mine, 1.0, "CheckpointVerified", "another", {"manifest": manifest.path(4, 1)}),
                (mine, 1.0, "CheckpointExported", "another", {"manifest": path, "to": "/x"}),
                (mine, 2.0, "CheckpointRejected", "block 0 is bad", {"manifest": path}),
            ]
        )
        assert client.answer(mine, first).reason == "block 0 is bad"
        later = client.verify(mine, 5)
        with pytest.raises(errors.ClusterError, match="nothing was heard of the verify of step 5"):
            client.answer(mine, later, timeout_s=0)


@pytest.mark.parametrize("phase", RUNNING)
def test_a_job_goes_back_where_it_is_asked_to(http: httpx.Client, world: World, phase: Phase) -> None:
    mine = world.submit().uid
    path = world.checkpoint(mine, 5)
    world.checkpoint(mine, 10)
    world.move(mine, phase)
    for _ in range(2):
        assert asked(http, mine, "/checkpoints/5:restore").status_code == 202
    assert world.intents(mine) == [("restore", {"step": 5, "attempt": 1, "manifest": path})]


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase not in RUNNING])
def test_what_is_over_can_not_go_back_and_is_forked(http: httpx.Client, world: World, phase: Phase) -> None:
    mine = world.submit().uid
    world.checkpoint(mine, 5)
    world.move(mine, phase)
    answer = asked(http, mine, "/checkpoints/5:restore")
    assert (answer.status_code, answer.json()["reason"]) == (409, "conflict")
    assert f"phalanx checkpoint fork {mine}" in answer.json()["hint"]
    assert world.intents(mine) == []
    assert asked(http, mine, ":fork").status_code == 201


def test_of_several_attempts_a_good_one_is_taken(http: httpx.Client, world: World) -> None:
    mine = world.submit().uid
    path = world.checkpoint(mine, 5)
    world.checkpoint(mine, 5, attempt=2, rejected="torn")
    world.move(mine, Phase.RUNNING)
    assert asked(http, mine, "/checkpoints/5:restore").status_code == 202
    assert world.intents(mine)[0][1]["manifest"] == path
    assert asked(http, mine, "/checkpoints/5:restore?attempt=2").status_code == 409


@pytest.mark.parametrize(
    ("place", "body", "field", "says"),
    [
        ("/etc/out", {}, "to", "not under a storage root"),
        ("ROOT/../out", {}, "to", "'..'"),
        ("out", {}, "to", "relative path"),
        ("http://host/out", {}, "to", "can't be used"),
        ("\0", {}, "to", "no path has"),
        ("ROOT/out", {"dtype": "int8"}, "dtype", "float64"),
        ("ROOT/out", {"colour": "red"}, "colour", "Extra inputs"),
        (None, {}, "to", "required"),
        (7, {}, "to", "valid string"),
    ],
)
def test_an_export_goes_only_where_the_service_may_write(
    http: httpx.Client, world: World, uid: str, place: Any, body: dict[str, Any], field: str, says: str
) -> None:
    to = place.replace("ROOT", world.root) if isinstance(place, str) else place
    answer = asked(http, uid, "/checkpoints/5:export", json={**body, **({} if to is None else {"to": to})})
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert says in answer.json()["detail"]
    assert world.intents(uid) == []


def test_an_export_is_an_intent_and_its_answer_an_event(world: World) -> None:
    mine = world.submit().uid
    path, to = world.checkpoint(mine, 5), f"{world.root}/hub/model"
    with world.client() as client:
        made = client.export(mine, to, dtype="bfloat16")
        wish = {"step": 5, "attempt": 1, "manifest": path, "to": to, "dtype": "bfloat16", "adapter": False}
        assert world.intents(mine) == [("export", wish)]
        told = [("elsewhere", f"{to}2"), ("here", to)]
        world.commit(
            events=[(mine, 1.0, "CheckpointExported", why, {"manifest": path, "to": where}) for why, where in told]
        )
        assert client.answer(mine, made).reason == "here"


def test_a_damaged_manifest_is_told(http: httpx.Client, world: World) -> None:
    mine = world.submit().uid
    file = Path(world.root, mine, world.checkpoint(mine, 5))
    file.write_bytes(file.read_bytes().replace(b'"samples":40', b'"samples":41'))
    for answer in (http.get(f"/v1/jobs/{mine}/checkpoints/5"), asked(http, mine, ":fork")):
        assert (answer.status_code, answer.json()["reason"]) == (409, "conflict")
        assert "fails its digest" in answer.json()["detail"]
        assert "verify" in answer.json()["hint"]


@pytest.mark.parametrize(
    ("body", "step", "expected"),
    [
        (None, 15, {}),
        ({}, 15, {}),
        ({"step": 5}, 5, {}),
        ({"step": 10, "attempt": 1}, 10, {}),
        ({"overrides": {"name": "other", "train": {"steps": 50, "learning_rate": 1e-4}}}, 15,
         {"name": "other", "train.steps": 50, "train.learning_rate": 1e-4, "train.global_batch": 8}),
        ({"overrides": {"parallel": {"dp": 4}, "resources": {"slots": 4}}}, 15, {"parallel.dp": 4}),
    ],
)  # fmt: skip
def test_a_fork_is_a_new_job_that_begins_at_a_checkpoint(
    http: httpx.Client, world: World, uid: str, body: dict[str, Any] | None, step: int, expected: dict[str, Any]
) -> None:
    answer = asked(http, uid, ":fork") if body is None else asked(http, uid, ":fork", json=body)
    made = answer.json()
    assert (answer.status_code, answer.headers["Location"]) == (201, f"/v1/jobs/{made['uid']}")
    attempt = (body or {}).get("attempt", 2 if step > 5 else 1)
    path = manifest.path(step, attempt)
    start = {"job": uid, "step": step, "attempt": attempt, "root": world.root, "manifest": path, "huggingface": None}
    assert made["spec"]["init_from"] == start
    assert made["uid"] != uid
    for name, value in expected.items():
        inner = made["spec"]
        for part in name.split("."):
            inner = inner[part]
        assert inner == value
    assert f"to begin at step {step} of {uid}" in world.store.events(made["uid"], 0)[0].reason
    again = asked(http, uid, ":fork", json={"step": 5}, headers={"Idempotency-Key": f"fork-{step}"})
    assert asked(http, uid, ":fork", json={"step": 5}, headers={"Idempotency-Key": f"fork-{step}"}).json() == {
        **again.json(), "goodput": 0.0
    }  # fmt: skip
    assert asked(http, uid, ":fork", json={"step": 10}, headers={"Idempotency-Key": f"fork-{step}"}).status_code == 409


@pytest.mark.parametrize(
    ("body", "status", "field", "says"),
    [
        ({"step": 7}, 404, "step", "no checkpoint of step 7"),
        ({"step": 20}, 409, "step", "never used again"),
        ({"step": -1}, 422, "step", "greater than or equal"),
        ({"step": 2**60}, 422, "step", "less than"),
        ({"step": "x"}, 422, "step", "valid integer"),
        ({"colour": "red"}, 422, "colour", "Extra inputs"),
        ({"overrides": []}, 422, "overrides", "valid dictionary"),
        ({"overrides": {"colour": "red"}}, 422, "colour", "unknown field 'colour'"),
        ({"overrides": {"train": None}}, 422, "train", "required"),
        ({"overrides": {"init_from": None}}, 422, "overrides.init_from", "is what a fork sets"),
        ({"overrides": {"train": {"steps": 15}}}, 422, "train.steps", "nothing to train after step 15"),
        ({"overrides": {"model": {"layers": 2}}}, 422, "init_from", "of another model (layers 4, now 2)"),
        ({"overrides": {"train": {"seed": 9}}}, 422, "init_from", "trained on other samples (seed 0, now 9)"),
        ({"overrides": {"checkpoint": {"root": "/etc"}}}, 422, "checkpoint.root", "not under a storage root"),
        ({"overrides": {"parallel": {"tp": 3}}}, 422, "parallel", "tp 3 uses 3 of 4 slots"),
    ],
)
def test_a_fork_that_can_not_be(
    http: httpx.Client, uid: str, body: dict[str, Any], status: int, field: str, says: str
) -> None:
    answer = asked(http, uid, ":fork", json=body)
    assert (answer.status_code, answer.json()["field"]) == (status, field)
    assert says in answer.json()["detail"]


def test_a_job_may_be_submitted_with_its_beginning(http: httpx.Client, world: World, uid: str) -> None:
    made = http.post("/v1/jobs", json=job({"train.steps": 40, "init_from": {"job": uid, "step": 10}}))
    assert made.status_code == 201
    whole = made.json()["spec"]["init_from"]
    assert whole["manifest"] == manifest.path(10, 2)
    assert http.post("/v1/jobs", json=made.json()["spec"]).status_code == 201  # as it is told, it may come back


@pytest.mark.parametrize(
    ("start", "field", "says"),
    [
        ({"job": "nobody-00000000"}, "init_from.job", "there is no job nobody-00000000"),
        ({"job": "../etc"}, "init_from.job", "pattern"),
        ({"job": "UID", "step": 7}, "init_from.step", "no checkpoint of step 7"),
        ({"job": "UID", "step": 20}, "init_from.step", "never used again"),
        ({"job": "UID", "root": "/etc"}, "init_from.root", "not /etc"),
        ({"job": "UID", "step": 5, "manifest": "manifests/0000000010-000001.json"}, "init_from.manifest", "0000000005"),
        ({"job": "UID", "manifest": "../../etc/passwd"}, "init_from.manifest", "pattern"),
        ({"job": "UID", "step": True}, "init_from.step", ""),
        ({}, "init_from", "names a job, or a folder under huggingface"),
        ("UID", "init_from", "mapping of fields (attempt, huggingface, job, manifest, root, step)"),
    ],
)
def test_a_beginning_that_is_none(http: httpx.Client, uid: str, start: Any, field: str, says: str) -> None:
    given = {k: uid if v == "UID" else v for k, v in start.items()} if isinstance(start, dict) else uid
    answer = http.post("/v1/jobs", json=job({"train.steps": 40, "init_from": given}))
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert says in answer.json()["detail"]


@pytest.mark.parametrize(
    ("whole", "change", "made"),
    [
        ({"a": 1}, {}, {"a": 1}),
        ({"a": 1}, {"a": 2, "b": 3}, {"a": 2, "b": 3}),
        ({"a": 1}, {"a": None, "b": None}, {}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": None, "d": 3}}, {"a": {"c": 2, "d": 3}}),
        ({"a": {"b": 1}}, {"a": "auto"}, {"a": "auto"}),
        ({"a": "auto"}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
    ],
)
def test_a_merge_patch(whole: dict[str, Any], change: dict[str, Any], made: dict[str, Any]) -> None:
    before = repr(whole)
    assert patch.merged(whole, change) == made
    assert repr(whole) == before
