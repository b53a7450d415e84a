"""Nonsense over HTTP: never a failure inside, always a problem document; and nonsense as answers to the client."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.contracts.job import JobSpec
from tests.api.world import World, job

pytestmark = pytest.mark.server

P = "/v1/jobs"
ODD_PATHS = ["/a\0b", "/\ud800", "/" + "a" * 5000, "/" + "a/" * 3000, "/[/**/x", "/**", "s3://*/x", "::", "file://", ""]
NUMBERS = st.sampled_from([0, -1, 1, True, 2**31, 2**63, 10**30, -(10**30), 0.5, 1e308, float("nan"), float("-inf")])
TEXTS = st.one_of(st.text(max_size=8), st.sampled_from([*ODD_PATHS, "auto", "\r\nX-Evil: 1", "é", "\U0001f600"]))
JSON = st.recursive(
    st.one_of(st.none(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)


def fields(spec: Any = JobSpec, above: str = "") -> list[str]:
    """Dotted names of all fields of a job, sections too."""
    found: list[str] = []
    for name, field in spec.model_fields.items():
        found.append(above + name)
        if hasattr(field.annotation, "model_fields"):
            found += fields(field.annotation, f"{above}{name}.")
    return found


def told(answer: httpx.Response) -> None:
    """Accepted; or refused with a whole problem document."""
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.headers["Content-Type"] == "application/problem+json"
        body = answer.json()
        assert body["status"] == answer.status_code
        assert body["reason"]
        assert body["detail"]


def post(http: httpx.Client, content: bytes, **headers: str) -> httpx.Response:
    return http.post(P, content=content, headers={"Content-Type": "application/json", **headers})


SLOW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SLOW
@given(changes=st.dictionaries(st.sampled_from(fields()), JSON, min_size=1, max_size=2))
def test_a_job_with_nonsense_in_it(http: httpx.Client, changes: dict[str, Any]) -> None:
    made = job()
    for path, value in changes.items():
        section, _, name = path.rpartition(".")
        inner = made.setdefault(section, {}) if section else made
        if isinstance(inner, dict):
            inner[name] = value
    told(post(http, json.dumps(made).encode()))


@SLOW
@given(body=st.one_of(JSON.map(json.dumps).map(str.encode), st.binary(max_size=40)))
def test_a_body_that_is_no_job(http: httpx.Client, body: bytes) -> None:
    told(post(http, body))


@SLOW
@given(body=JSON, route=st.sampled_from([":fork", "/checkpoints/newest:export", "/checkpoints/5:verify"]))
def test_a_wish_that_makes_no_sense(http: httpx.Client, world: World, route: str, body: Any) -> None:
    uid = next((row.uid for row in world.store.jobs(limit=1)), None) or world.submit().uid
    nested = body if isinstance(body, dict) else {"overrides": {"train": body}, "to": body}
    for wish in (body, nested, {"overrides": nested}):
        told(http.post(f"{P}/{uid}{route}", content=json.dumps(wish), headers={"Content-Type": "application/json"}))


@SLOW
@given(
    route=st.sampled_from(
        [
            "",
            "/{uid}/events",
            "/{uid}/logs",
            "/{uid}/metrics",
            "/{uid}/checkpoints",
            "/{uid}",
            "/{uid}/checkpoints/5",
            "/{uid}/checkpoints/newest",
        ]
    ),
    name=st.sampled_from(["page", "limit", "phase", "after", "rank", "attempt", "after_step"]),
    value=st.one_of(
        TEXTS.filter(lambda text: "\ud800" not in text),
        NUMBERS.map(str),
        st.integers(0, 10**40).map(str),
        st.integers().map(lambda n: base64.urlsafe_b64encode(f"seq:{n}".encode()).decode().rstrip("=")),
        st.sampled_from(["٣", "٣:١", "9" * 18, "9" * 18 + ":1", "9" * 5000]),
    ),
)
def test_a_query_that_asks_for_nothing(http: httpx.Client, world: World, route: str, name: str, value: str) -> None:
    uid = next((row.uid for row in world.store.jobs(limit=1)), None) or world.submit().uid
    told(http.get(P + route.format(uid=uid), params={name: value}))


@pytest.mark.parametrize(
    "body",
    [b"", b"NaN", b"[" * 100_000, b'{"a":' * 20_000, b'{"a": ' + b"9" * 5000 + b"}", b"\xff\xfe{}", b'{"\\ud800": 1}'],
)
def test_bodies_that_break_parsers(http: httpx.Client, body: bytes) -> None:
    answer = post(http, body)
    told(answer)
    assert answer.status_code in (400, 422)


def test_a_body_of_ten_megabytes_is_not_read(http: httpx.Client) -> None:
    assert post(http, b'"' + b"a" * 10_000_000 + b'"').status_code == 413

    def pieces() -> Any:
        yield from [b"a" * 65_536] * 40

    assert http.post(P, content=pieces(), headers={"Content-Type": "application/json"}).status_code == 413


@pytest.mark.parametrize("path", ODD_PATHS)
@pytest.mark.parametrize("field", ["data.source", "data.tokenizer", "checkpoint.root"])
def test_paths_that_no_file_has(http: httpx.Client, field: str, path: str) -> None:
    answer = post(http, json.dumps(job({field: path})).encode())
    told(answer)
    assert (answer.status_code, answer.json()["field"]) == (422, field)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ";;//"])
def test_a_body_of_another_kind(http: httpx.Client, kind: str) -> None:
    answer = http.post(P, content=json.dumps(job()).encode(), headers={"Content-Type": kind})
    told(answer)
    assert answer.status_code == 422


def test_no_header_can_be_smuggled(http: httpx.Client) -> None:
    answer = http.get(f"{P}/a%0d%0aX-Evil:%201", headers={"X-Request-Id": "a b<script>"})
    told(answer)
    assert "X-Evil" not in answer.headers
    assert answer.headers["X-Request-Id"].isalnum()
