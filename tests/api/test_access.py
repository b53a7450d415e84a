"""Who may do what: no token, a wrong one, one that only reads, another project's; on every route and verb."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api import tokens
from api.auth import OPEN_PATHS
from api.client import Client
from api.principal import ROOT, Principal, needed
from api.tokens import Keys
from service.contracts import errors
from service.store.records import Scope
from tests.api.test_auth import routes
from tests.api.world import TOKEN, World, job


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("access"))
    with made.client() as root:
        root.make_project("vision")
        root.make_project("speech", slots=8)
    yield made
    made.close()


def holder(world: World, scope: Scope, project: str | None = None) -> Client:
    with world.client() as root:
        return Client(world.url, root.make_token(f"{scope} of {project}", scope, project).token)


def asked(world: World, token: str, method: str, path: str) -> httpx.Response:
    return httpx.request(method, f"{world.url}{path}", headers={"Authorization": f"Bearer {token}"}, timeout=10)


def walked(world: World, uid: str) -> list[tuple[str, str]]:
    """Every route and verb, about this job."""
    found = {(method, path.replace("topics-00000000", uid)) for method, path in routes(world.app.routes)}
    kept = [(method, path) for method, path in found if path not in OPEN_PATHS]
    return sorted(
        (method, path.replace("{step}", "newest").replace("{name}", "x").replace("{id_}", "x")) for method, path in kept
    )


def test_who_only_reads_changes_nothing(here: World) -> None:
    with here.client() as root, holder(here, "read") as reader:
        uid = root.submit(job()).uid
        for method, path in walked(here, uid):
            answer = asked(here, reader.token, method, path)
            if needed(method, path) == "read":
                assert answer.status_code != 403, (method, path)
            else:
                assert (answer.status_code, answer.headers["Content-Type"]) == (403, "application/problem+json")
        assert root.get(uid).cancel_requested is False


def test_another_projects_job_is_none(here: World) -> None:
    with holder(here, "submit", "vision") as own, holder(here, "submit", "speech") as other:
        uid = own.submit(job()).uid
        assert own.get(uid).project == "vision"
        here.checkpoint(uid, 5)
        mine = [(method, path) for method, path in walked(here, uid) if uid in path and method != "DELETE"]
        for method, path in mine:
            answer = asked(here, other.token, method, path)
            assert answer.status_code in (404, 422), (method, path)  # 422: without a body nothing is looked up
        assert not own.get(uid).cancel_requested
        for method, path in mine:
            assert asked(here, own.token, method, path).status_code != 404, (method, path)
        assert uid in {view.uid for view in own.list()}
        assert uid not in {view.uid for view in other.list()}
        with pytest.raises(errors.NotFound):
            other.cancel(uid)
        with pytest.raises(errors.UserError, match="no job"):
            other.submit(job({"init_from": {"job": uid}}))
        with pytest.raises(errors.UserError, match="no project vision"):
            other.submit(job(), project="vision")


def test_a_key_is_of_its_project(here: World) -> None:
    with holder(here, "submit", "vision") as one, holder(here, "submit", "speech") as two:
        assert one.submit(job(), key="same").uid != two.submit(job({"train.steps": 7}), key="same").uid


def test_an_operator_may_work_in_any_project(here: World) -> None:
    with here.client() as root:
        assert root.submit(job(), project="speech").project == "speech"
        assert root.submit(job()).project == "default"
        with pytest.raises(errors.UserError, match="no project nowhere"):
            root.submit(job(), project="nowhere")
        with pytest.raises(errors.Conflict, match="vision already"):
            root.make_project("vision")
        assert [one.name for one in root.projects()] == ["default", "speech", "vision"]


def test_a_revoked_token_opens_nothing_after_a_while(here: World) -> None:
    now = [1000.0]
    keys = Keys(here.store.access, TOKEN, lambda: now[0])
    made = tokens.make(here.store.access, "short", "read", None, 60.0, now[0])
    assert keys.holder(made.text) == Principal(f"short ({made.row.id})", "read")
    here.store.access.revoke(made.row.id, now[0])
    here.store.access.revoke(made.row.id, now[0] + 1)  # once is enough
    assert keys.holder(made.text) is not None  # it is known for some seconds
    now[0] += tokens.KNOWN_S
    assert keys.holder(made.text) is None
    with pytest.raises(errors.NotFound):
        here.store.access.revoke("nothing", now[0])


def test_a_token_ends_by_itself(here: World) -> None:
    now = [1000.0]
    keys = Keys(here.store.access, TOKEN, lambda: now[0])
    made = tokens.make(here.store.access, "short", "read", "vision", 2.0, now[0])
    assert keys.holder(made.text) == Principal(f"short ({made.row.id})", "read", "vision")
    now[0] += 2.0
    assert keys.holder(made.text) is None


@pytest.mark.parametrize("change", ["phx_", "secret", "id", "case"])
def test_what_is_not_quite_a_token_opens_nothing(here: World, change: str) -> None:
    keys = Keys(here.store.access, TOKEN)
    text = tokens.make(here.store.access, "mine", "admin", None, None, time.time()).text
    other = tokens.make(here.store.access, "other", "admin", None, None, time.time()).text
    wrong = {
        "phx_": text.removeprefix("phx_"),
        "secret": text[:-1] + ("A" if text[-1] != "A" else "B"),
        "id": other[:16] + text[16:],
        "case": text.upper(),
    }[change]
    assert keys.holder(text) is not None
    assert keys.holder(wrong) is None


def test_secrets_are_nowhere(here: World) -> None:
    with here.client() as root:
        made = root.make_token("a person", "submit", "vision")
        assert made.token.startswith(f"phx_{made.id}_")
        secret = made.token[-43:]
        assert all(secret not in one.model_dump_json() for one in root.tokens())
    stored = (here.home / "store.sqlite3").read_bytes() + (here.home / "store.sqlite3-wal").read_bytes()
    assert secret.encode() not in stored
    assert made.id.encode() in stored


def test_what_was_changed_and_by_whom_is_noted(tmp_path: Path) -> None:
    with contextlib.closing(World(tmp_path)) as world, world.client() as root:
        root.make_project("vision")
        with holder(world, "submit", "vision") as own:
            uid = own.submit(job()).uid
            own.get(uid)
            own.cancel(uid)
            with pytest.raises(errors.UserError):
                own.submit({})
            made = [(one.who.partition(" (")[0], one.action, one.target, one.status) for one in root.audit("vision")]
        assert made == [
            ("submit of vision", "POST", "/v1/jobs", 201),
            ("submit of vision", "POST", f"/v1/jobs/{uid}:cancel", 202),
            ("submit of vision", "POST", "/v1/jobs", 422),
        ]
        assert [one.target for one in root.audit()][:2] == ["/v1/projects", "/v1/tokens"]
        assert {one.who for one in root.audit()} >= {"root"}


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/v1/jobs", "read"),
        ("POST", "/v1/jobs", "submit"),
        ("POST", "/v1/plan", "read"),
        ("GET", "/v1/nodes", "read"),
        ("POST", "/v1/nodes/n1:forgive", "admin"),
        ("GET", "/v1/tokens", "admin"),
        ("DELETE", "/v1/tokens/x", "admin"),
        ("GET", "/v1/audit", "admin"),
        ("POST", "/v1/projects", "admin"),
        ("GET", "/v1/projects", "admin"),
        ("PATCH", "/v1/anything", "submit"),
    ],
)
def test_what_a_request_needs(method: str, path: str, scope: Scope) -> None:
    assert needed(method, path) == scope
    assert ROOT.may(scope)
    assert Principal("x", "submit").may(scope) is (scope != "admin")
