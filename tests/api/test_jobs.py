"""POST, GET and cancel: what is accepted, what is refused and how it is told."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.contracts import errors
from service.contracts.job import Phase
from tests.api.world import GONE, World, job


def test_a_job_is_created_and_found(http: httpx.Client, world: World) -> None:
    answer = http.post("/v1/jobs", json=job())
    made = answer.json()
    assert answer.status_code == 201
    assert re.fullmatch(r"topics-[0-9a-f]{8}", made["uid"])
    assert answer.headers["Location"] == f"/v1/jobs/{made['uid']}"
    assert (made["phase"], made["cancel_requested"], made["ended_at"]) == ("queued", False, None)
    assert made["status"]["progress"]["steps"] == 20
    assert made["spec"]["train"]["learning_rate"] == 3e-4
    assert made["storage"] == f"{world.root}/{made['uid']}"
    assert http.get(answer.headers["Location"]).json() == {**made, "goodput": 0.0}
    assert [event.type for event in world.store.events(made["uid"], 0)] == ["JobSubmitted"]


def test_a_job_keeps_its_own_root(http: httpx.Client, world: World) -> None:
    made = http.post("/v1/jobs", json=job({"checkpoint.root": f"{world.home}/more/mine"})).json()
    assert made["storage"] == f"{world.home}/more/mine/{made['uid']}"


REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"colour": "red"}, "colour", "unknown field 'colour'", "parallel"),
    ({"train.stepz": 3}, "train.stepz", "unknown field 'stepz' in train", "global_batch"),
    ({"model": GONE}, "model", "field 'model' is required", ""),
    ({"train.steps": 0}, "train.steps", "greater than 0", ""),
    ({"name": "Not A Name"}, "name", "not 'Not A Name'", "lower-case letters, digits and dashes"),
    ({"model.heads": 5}, "model.head_dim", "not divisible by heads 5", "try hidden"),
    ({"model.family": "gpt"}, "model.family", "neither llama nor an import path", "my_package.my_module:MyModel"),
    ({"model.family": "os:system"}, "model.family", "no model from os", "under mine.models; or bring it along"),
    (
        {"parallel": {"tp": 3}, "resources.slots": 3},
        "parallel",
        "tp 3 does not divide 4 heads",
        "Layouts that work on 3 slots",
    ),
    ({"parallel": {"dp": 2, "pp": 2, "tp": 2}}, "parallel", "needs 8 slots, not 4", "Layouts that work on 4 slots"),
    ({"data.source": "/no/such.txt"}, "data.source", "matches no file", "builtin:topics"),
    ({"eval": {"data": [{"source": "/no/such.txt"}]}}, "eval.data.0.source", "matches no file", "builtin:topics"),
    ({"data.tokenizer": "/no/such.json"}, "data.tokenizer", "is not there", "byte"),
    ({"checkpoint.root": "/etc"}, "checkpoint.root", "not under a storage root", "leave it out"),
    ({"checkpoint.root": "http://host/x"}, "checkpoint.root", "can't be used", "s3://"),
    ({"resources.slots": 16}, "resources.slots", "needs 16 cpu slots; the fleet has 8", "8 or less"),
    ({"resources.device": "gpu"}, "resources.device", "needs 4 gpu slots", "cpu"),
]


@pytest.mark.parametrize(("changes", "field", "says", "works"), REFUSED)
def test_what_is_wrong_is_named_with_what_would_work(
    http: httpx.Client, world: World, changes: dict[str, Any], field: str, says: str, works: str
) -> None:
    with world.fleet(4, 4):
        answer = http.post("/v1/jobs", json=job(changes))
    body = answer.json()
    assert (answer.status_code, answer.headers["Content-Type"]) == (422, "application/problem+json")
    assert set(body) == {"type", "title", "status", "detail", "reason", "hint", "field"}
    assert (body["status"], body["reason"], body["field"]) == (422, "invalid", field)
    assert says in body["detail"]
    assert works in body["detail"] + body["hint"]


def test_a_model_from_where_the_operator_allows_is_taken_without_a_look_at_it(http: httpx.Client) -> None:
    answer = http.post("/v1/jobs", json=job({"model.family": "mine.models.that_is_not_there:Model"}))
    assert (answer.status_code, answer.json()["spec"]["model"]["family"].partition(":")[2]) == (201, "Model")


def test_a_fleet_that_has_room_accepts(http: httpx.Client, world: World) -> None:
    with world.fleet(4, 4):
        assert http.post("/v1/jobs", json=job({"resources.slots": 8})).status_code == 201


def test_a_body_that_does_not_say_how_long_it_is_has_the_same_bound(http: httpx.Client) -> None:
    parts = (b" " * 100_000 for _ in range(30))
    answer = http.post("/v1/jobs", content=parts, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["reason"]) == (413, "too_large")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason", "field"),
    [
        ("POST", "/v1/jobs", b"{not json", 400, "invalid", "body"),
        ("POST", "/v1/jobs", b"[1, 2]", 422, "invalid", "body"),
        ("POST", "/v1/jobs", b"", 422, "invalid", "body"),
        ("POST", "/v1/jobs", b"[" * 2_000_000, 413, "too_large", ""),
        ("GET", "/v1/jobs?limit=0", b"", 422, "invalid", "limit"),
        ("GET", "/v1/jobs?limit=x", b"", 422, "invalid", "limit"),
        ("GET", "/v1/jobs?phase=lost", b"", 422, "invalid", "phase"),
        ("GET", "/v1/jobs?page=garbage", b"", 422, "invalid", "page"),
        ("GET", "/v1/jobs?page=c2VxOng", b"", 422, "invalid", "page"),
        ("GET", "/v1/jobs/nobody-00000000", b"", 404, "not_found", ""),
        ("GET", "/v1/jobs/No%20Body%00", b"", 404, "not_found", "uid"),
        ("GET", "/v1/jobs/nobody-00000000/events", b"", 404, "not_found", ""),
        ("GET", "/v1/jobs/nobody-00000000/logs", b"", 404, "not_found", ""),
        ("GET", "/v1/jobs/nobody-00000000/metrics", b"", 404, "not_found", ""),
        ("GET", "/v1/jobs/nobody-00000000/checkpoints", b"", 404, "not_found", ""),
        ("POST", "/v1/jobs/nobody-00000000:cancel", b"", 404, "not_found", ""),
        ("DELETE", "/v1/jobs", b"", 405, "method_not_allowed", ""),
        ("GET", "/v2/jobs", b"", 404, "not_found", ""),
    ],
)
def test_every_refusal_is_a_problem(
    http: httpx.Client, method: str, path: str, body: bytes, status: int, reason: str, field: str
) -> None:
    answer = http.request(method, path, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.headers["Content-Type"]) == (status, "application/problem+json")
    assert (answer.json()["reason"], answer.json()["field"]) == (reason, field)
    assert answer.json()["detail"]


def test_the_same_key_submits_once(http: httpx.Client, world: World, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("text")
    body, key = job({"data.source": str(corpus)}), {"Idempotency-Key": "one"}
    first = http.post("/v1/jobs", json=body, headers=key)
    again = http.post("/v1/jobs", json=body, headers=key)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["uid"] == first.json()["uid"]
    assert again.headers["Location"] == first.headers["Location"]

    corpus.unlink()  # what was accepted once is answered again, also when it would not be accepted now
    assert http.post("/v1/jobs", json=body, headers=key).json()["uid"] == first.json()["uid"]
    assert http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "two"}).status_code == 422

    other = http.post("/v1/jobs", json=job({"train.steps": 21}), headers=key)
    assert (other.status_code, other.json()["field"]) == (422, "Idempotency-Key")
    assert first.json()["uid"] in other.json()["detail"]
    assert "new key" in other.json()["hint"]


def test_a_job_spelled_otherwise_is_the_same_job(http: httpx.Client) -> None:
    key = {"Idempotency-Key": "spelled"}
    first = http.post("/v1/jobs", json=job(), headers=key).json()
    spelled = dict(reversed(job({"train.seed": 0, "train.learning_rate": 0.0003}).items()))
    assert http.post("/v1/jobs", json=spelled, headers=key).json()["uid"] == first["uid"]


def test_pages_hold_every_job_once_newest_first(http: httpx.Client, world: World) -> None:
    made = [http.post("/v1/jobs", json=job({"name": f"paged{n}"})).json()["uid"] for n in range(5)]
    query: dict[str, Any] = {"limit": 2, "phase": "queued"}
    found: list[str] = []
    while True:
        page = http.get("/v1/jobs", params=query).json()
        assert len(page["jobs"]) <= 2
        found += [item["uid"] for item in page["jobs"]]
        if page["next_page"] is None:
            break
        query["page"] = page["next_page"]
    assert found[:5] == made[::-1]
    assert len(found) == len(set(found))


def test_a_phase_filters(http: httpx.Client, world: World) -> None:
    uid = world.submit({"name": "filtered"}).uid
    world.move(uid, Phase.RUNNING)
    assert [item["uid"] for item in http.get("/v1/jobs?phase=running").json()["jobs"]] == [uid]
    assert uid not in [item["uid"] for item in http.get("/v1/jobs?phase=queued&limit=200").json()["jobs"]]
    world.move(uid, Phase.SUCCEEDED)


def test_cancel_leaves_an_intent_once(http: httpx.Client, world: World) -> None:
    uid = world.submit().uid
    for _ in range(2):
        answer = http.post(f"/v1/jobs/{uid}:cancel")
        assert (answer.status_code, answer.json()["cancel_requested"]) == (202, True)
    assert [intent.kind for intent in world.store.intents() if intent.job == uid] == ["cancel"]


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase.terminal])
def test_what_is_over_can_not_be_cancelled(http: httpx.Client, world: World, phase: Phase) -> None:
    uid = world.submit().uid
    world.move(uid, phase)
    answer = http.post(f"/v1/jobs/{uid}:cancel")
    assert (answer.status_code, answer.json()["reason"]) == (409, "conflict")
    assert phase.value in answer.json()["detail"]


def test_goodput_counts_to_the_end_of_the_job(http: httpx.Client, world: World) -> None:
    uid = world.submit().uid
    world.move(uid, Phase.SUCCEEDED, step=20, loss=2.5)
    first, second = (http.get(f"/v1/jobs/{uid}").json() for _ in range(2))
    assert first == second
    assert first["goodput"] == pytest.approx(min(1.0, 0.5 / (first["ended_at"] - first["created_at"])))
    assert (first["phase"], first["status"]["progress"]["loss"]) == ("succeeded", 2.5)


def test_every_answer_has_its_headers(http: httpx.Client) -> None:
    for path in ("/healthz", "/v1/jobs", "/nowhere"):
        headers = http.get(path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cache-Control"] == "no-store"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert len(headers["X-Request-Id"]) == 32
    assert http.get("/healthz", headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
    assert http.get("/healthz", headers={"X-Request-Id": "a b"}).headers["X-Request-Id"] != "a b"


def test_a_submission_does_not_wait(http: httpx.Client) -> None:
    began = time.monotonic()
    http.post("/v1/jobs", json=job())
    assert time.monotonic() - began < 2


def test_a_list_of_some_jobs(http: httpx.Client, world: World) -> None:
    def made(name: str, **labels: str) -> str:
        return str(http.post("/v1/jobs", json=job({"name": name, "labels": labels})).json()["uid"])

    one, two, other = made("some-1", set="a"), made("some-2", set="b"), made("other", set="a")
    with world.client() as client:
        assert [view.uid for view in client.list(name="some-*")] == [two, one]
        assert [view.uid for view in client.list(labels={"set": "a"}, oldest=True, page_size=1)] == [one, other]
        assert [view.uid for view in client.list(["queued", "running"], labels={"set": None})] == [other, two, one]
        assert not list(client.list("running", labels={"set": None}))
        assert client.get(one).spec["labels"] == {"set": "a"}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"label": "=x"}, "label"),
        ({"order": "name"}, "order"),
        ({"phase": "gone"}, "phase"),
        ({"name": "x" * 65}, "name"),
    ],
)
def test_a_list_of_nonsense(http: httpx.Client, query: dict[str, str], field: str) -> None:
    answer = http.get("/v1/jobs", params=query)
    assert (answer.status_code, answer.json()["field"]) == (422, field)


@pytest.mark.parametrize("labels", [{"": "x"}, {"a b": "x"}, {"a": "x y"}, {"-a": "x"}, {"a": 1}])
def test_labels_are_as_kubernetes_has_them(http: httpx.Client, labels: dict[str, Any]) -> None:
    answer = http.post("/v1/jobs", json=job({"labels": labels}))
    assert answer.status_code == 422
    assert answer.json()["field"].startswith("labels")


def test_a_dry_run_keeps_nothing_and_says_what_would_be(tmp_path: Path) -> None:
    with contextlib.closing(World(tmp_path)) as world, world.client() as client, world.fleet(4, 4):
        told = client.dry_run(job())
        assert (told.starts, told.layout and told.layout.world, len(told.placement)) == (True, 4, 4)
        assert told.plan is not None
        assert told.plan.layout == told.layout
        first = client.submit(job({"resources.slots": 8}))
        waits = client.dry_run(job({"resources.slots": 8}))
        assert (waits.starts, waits.layout, waits.placement) == (False, None, ())
        assert f"needs 8 slots; 0 of 8 are free, 8 held by {first.uid}" in waits.reason
        with pytest.raises(errors.UserError, match="needs 16 cpu slots"):
            client.dry_run(job({"resources.slots": 16}))
        assert [view.uid for view in client.list()] == [first.uid]
