"""Bearer tokens of an OpenID Connect issuer: signature, issuer, audience and time are checked, groups become roles.

`PHALANX_OIDC_GROUPS` says what members of a group may: `ml-admins=admin,vision-team=submit:vision,everyone=read`. Of a
member's roles one counts: what is for all projects before what is for one, then what allows more.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import urllib.request
from typing import Any, get_args

import jwt

from api.principal import SCOPES, Principal
from service.contracts import errors
from service.store.records import Scope

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")
"""None that a public key, which everybody has, could sign with."""
LEEWAY_S = 30.0
ASK_S = 5.0
KNOWN_S = 300.0  # that the issuer's keys are known without asking again
MOST_KNOWN = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    scope: Scope
    project: str | None = None  # None: all of them


@dataclasses.dataclass(frozen=True, slots=True)
class Trust:
    """Whose tokens open what."""

    issuer: str
    audience: str
    groups: dict[str, Role]
    claim: str = "groups"


def roles(text: str) -> dict[str, Role]:
    """UserError where that can't be read."""
    found: dict[str, Role] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        group, _, role = item.partition("=")
        scope, _, project = role.partition(":")
        if not group or scope not in get_args(Scope):
            hint = "write group=scope or group=scope:project, scope one of read, submit, admin"
            raise errors.UserError(
                f"PHALANX_OIDC_GROUPS: {item!r} gives no role", hint=hint, field="PHALANX_OIDC_GROUPS"
            )
        found[group] = Role(scope, project or None)  # type: ignore[arg-type]
    return found


class Issuer:
    """Asked for its keys only; safe for threads."""

    def __init__(self, trust: Trust) -> None:
        self.trust = trust
        self._keys: jwt.PyJWKClient | None = None
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, Principal]] = {}

    def holder(self, text: str) -> Principal | None:
        """Whose token it is; None: it opens nothing. ClusterError where the issuer can't be asked for its keys."""
        until, known = self._known.get(text, (0.0, None))
        if known is not None and time.time() < until:
            return known
        try:
            claims = self._checked(text)
        except jwt.PyJWKClientConnectionError as error:
            raise errors.ClusterError(f"the issuer {self.trust.issuer} does not answer", hint=str(error)) from error
        except jwt.PyJWTError:
            return None
        principal = self.principal(claims)
        if principal is not None:
            with self._lock:
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                self._known[text] = min(float(claims["exp"]), time.time() + KNOWN_S), principal
        return principal

    def principal(self, claims: dict[str, Any]) -> Principal | None:
        """None: none of its groups may anything."""
        told = claims.get(self.trust.claim) or []
        groups = told if isinstance(told, list) else [told]
        found = [self.trust.groups[group] for group in groups if group in self.trust.groups]
        if not found:
            return None
        best = max(found, key=lambda role: (role.project is None, SCOPES.index(role.scope)))
        name = claims.get("email") or claims.get("preferred_username") or claims["sub"]
        return Principal(str(name), best.scope, best.project)

    def _checked(self, text: str) -> dict[str, Any]:
        key = self._jwks().get_signing_key_from_jwt(text)
        claims: dict[str, Any] = jwt.decode(
            text, key.key, algorithms=list(ALGORITHMS), audience=self.trust.audience, issuer=self.trust.issuer,
            leeway=LEEWAY_S, options={"require": ["exp", "iat", "sub", "iss", "aud"]},
        )  # fmt: skip
        return claims

    def _jwks(self) -> jwt.PyJWKClient:
        with self._lock:
            if self._keys is None:
                where = f"{self.trust.issuer.rstrip('/')}/.well-known/openid-configuration"
                try:
                    with urllib.request.urlopen(where, timeout=ASK_S) as answer:
                        uri = str(json.load(answer)["jwks_uri"])
                except (OSError, ValueError, KeyError) as error:
                    raise jwt.PyJWKClientConnectionError(f"{where}: {error}") from error
                self._keys = jwt.PyJWKClient(uri, lifespan=int(KNOWN_S), timeout=int(ASK_S))
            return self._keys
