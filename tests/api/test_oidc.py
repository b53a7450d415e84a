"""Tokens of an OpenID Connect issuer: a real one, on a port of this machine."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from api import oidc, tokens
from api.app import create_app
from api.oidc import Issuer, Role, Trust
from api.principal import Principal
from api.rules import Rules
from service.contracts import errors
from tests.api.world import TOKEN, World

GROUPS = "ops=admin, vision=submit:vision, all=read"


class Provider:
    def __init__(self) -> None:
        self.keys = {"one": rsa.generate_private_key(65537, 2048)}
        self.asked: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                body = outer.documents()[self.path]
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: Any) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def documents(self) -> dict[str, Any]:
        public = [
            {
                **json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key())),
                "kid": name,
                "alg": "RS256",
                "use": "sig",
            }
            for name, key in self.keys.items()
        ]
        return {"/.well-known/openid-configuration": {"jwks_uri": f"{self.url}/keys"}, "/keys": {"keys": public}}

    def token(self, key: Any = None, kid: str = "one", algorithm: str = "RS256", **claims: Any) -> str:
        now = time.time()
        made = {"iss": self.url, "aud": "phalanx", "sub": "u1", "iat": now, "exp": now + 60, "groups": ["vision"]}
        whole = {name: value for name, value in {**made, **claims}.items() if value is not None}
        return jwt.encode(whole, key or self.keys[kid], algorithm, headers={"kid": kid})


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.server.shutdown()
    made.server.server_close()


def issuer(provider: Provider) -> Issuer:
    return Issuer(Trust(provider.url, "phalanx", oidc.roles(GROUPS)))


def test_groups_become_roles() -> None:
    assert oidc.roles(GROUPS) == {"ops": Role("admin"), "vision": Role("submit", "vision"), "all": Role("read")}
    assert oidc.roles("") == {}


@pytest.mark.parametrize("text", ["ops", "ops=root", "=read", "ops=admin,x"])
def test_a_role_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(errors.UserError, match="gives no role"):
        oidc.roles(text)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (["vision"], Principal("u1", "submit", "vision")),
        (["vision", "all"], Principal("u1", "read", None)),
        (["vision", "ops", "all"], Principal("u1", "admin", None)),
        ("ops", Principal("u1", "admin", None)),
        (["strangers"], None),
        ([], None),
        (None, None),
    ],
)
def test_a_member_may_what_his_groups_may(provider: Provider, groups: Any, expected: Principal | None) -> None:
    assert issuer(provider).holder(provider.token(groups=groups)) == expected


def test_people_have_names(provider: Provider) -> None:
    found = issuer(provider).holder(provider.token(email="a@b.c"))
    assert found is not None
    assert found.name == "a@b.c"


WRONG: dict[str, dict[str, Any]] = {
    "another issuer": {"iss": "https://elsewhere"},
    "another audience": {"aud": "other"},
    "over": {"exp": time.time() - 120},
    "without an end": {"exp": None},
    "without a subject": {"sub": None},
    "not yet": {"nbf": time.time() + 3600},
}


@pytest.mark.parametrize("claims", WRONG.values(), ids=WRONG.keys())
def test_what_is_not_for_us_opens_nothing(provider: Provider, claims: dict[str, Any]) -> None:
    assert issuer(provider).holder(provider.token(**claims)) is None


def test_who_signs_with_another_key_or_none_opens_nothing(provider: Provider) -> None:
    mine = issuer(provider)
    assert mine.holder(provider.token(rsa.generate_private_key(65537, 2048))) is None
    assert mine.holder(provider.token("secret" * 8, algorithm="HS256")) is None
    none = jwt.encode({"iss": provider.url, "aud": "phalanx", "sub": "u"}, None, "none", headers={"kid": "one"})
    assert mine.holder(none) is None
    assert mine.holder("a.b.c") is None


def test_keys_that_were_changed_are_found(provider: Provider) -> None:
    mine = issuer(provider)
    assert mine.holder(provider.token()) is not None
    assert mine._keys is not None
    mine._keys.cooldown_duration = 0  # between two looks for a key that is not known
    provider.keys["two"] = rsa.generate_private_key(65537, 2048)
    assert mine.holder(provider.token(kid="two")) is not None


def test_an_issuer_that_is_away_is_no_refusal() -> None:
    away = Issuer(Trust("http://127.0.0.1:9", "phalanx", oidc.roles(GROUPS)))
    key = rsa.generate_private_key(65537, 2048)
    with pytest.raises(errors.ClusterError, match="does not answer"):
        away.holder(jwt.encode({"sub": "u"}, key, "RS256", headers={"kid": "one"}))


def test_the_api_takes_both_kinds(world: World, provider: Provider) -> None:
    trust = Trust(provider.url, "phalanx", oidc.roles(GROUPS))
    world.store.access.add_project("vision", None, 1.0)
    world.stop()
    before, world.app = world.app, create_app(world.store, TOKEN, world.root, Rules(trust=trust))
    world.start()
    own = tokens.make(world.store.access, "x", "read", None, None, time.time()).text
    try:
        with httpx.Client(base_url=world.url) as client:

            def status(token: str, path: str = "/v1/jobs") -> int:
                return client.get(path, headers={"Authorization": f"Bearer {token}"}).status_code

            assert [status(one) for one in (TOKEN, own, provider.token(), provider.token(groups=["no"]))] == [
                200,
                200,
                200,
                401,
            ]
            assert status(provider.token(), "/v1/tokens") == 403
            assert status(provider.token(groups=["ops"]), "/v1/tokens") == 200
    finally:
        world.stop()
        world.app = before
        world.start()
