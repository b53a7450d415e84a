"""Nothing is told to whoever lacks the token."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from api import auth
from service.contracts import errors
from tests.api.world import TOKEN, World

WRONG = {
    "none": {},
    "wrong token": {"Authorization": "Bearer wrong"},
    "prefix of the token": {"Authorization": f"Bearer {TOKEN[:-1]}"},
    "other scheme": {"Authorization": f"Basic {TOKEN}"},
    "empty": {"Authorization": ""},
    "no scheme": {"Authorization": TOKEN},
    "not ASCII": {"Authorization": "Bearer sé"},
}


def routes(found: Iterable[object]) -> Iterator[tuple[str, str]]:
    for route in found:
        for method in sorted(getattr(route, "methods", None) or ()):
            yield method, route.path.replace(":word}", "}").replace("{uid}", "topics-00000000")
        yield from routes(getattr(getattr(route, "original_router", None), "routes", ()))


def test_the_walk_finds_every_documented_route(world: World) -> None:
    walked = {path for _, path in routes(world.app.routes)}
    documented = {path.replace("{uid}", "topics-00000000") for path in world.app.openapi()["paths"]}
    assert documented <= walked
    assert len(documented) >= 10


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG.keys())
def test_every_route_refuses(world: World, headers: dict[str, str]) -> None:
    encoded = {name: value.encode() for name, value in headers.items()}
    with httpx.Client(base_url=world.url) as client:
        for method, path in [*routes(world.app.routes), ("GET", "/no/such/route"), ("GET", "/")]:
            answer = client.request(method, path, headers=encoded)
            if path in auth.OPEN_PATHS:
                assert answer.status_code in (200, 405), path
            else:
                assert answer.status_code == 401, (method, path)
                assert answer.headers["WWW-Authenticate"].startswith("Bearer")
                assert answer.headers["Content-Type"] == "application/problem+json"
                if method != "HEAD":
                    assert answer.json()["reason"] == "unauthorized"
                    assert "token" in answer.json()["hint"]


def test_the_token_opens(http: httpx.Client) -> None:
    assert http.get("/v1/jobs").status_code == 200
    assert http.get("/v1/openapi.json").json()["info"]["title"] == "Phalanx"
    assert http.get("/v1/jobs", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200


def test_the_token_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "home"
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: auth.load_or_create_token(home), range(32)))
    assert len(tokens) == 1
    assert len(tokens.pop()) >= 40
    assert stat.S_IMODE((home / "token").stat().st_mode) == 0o600
    assert [path.name for path in home.iterdir()] == ["token"]


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(errors.UserError, match="empty"):
        auth.load_or_create_token(tmp_path)
