"""Tokens: `phx_ID_SECRET`. The secret is told once, when it is made; its digest tells whether it is the right one."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable

from api.oidc import Issuer
from api.principal import ROOT, Principal
from service.store.access import Access
from service.store.records import Scope, TokenRow

SHAPE = re.compile(r"phx_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
KNOWN_S = 5.0  # that a revoked token may still open, at most
MOST_KNOWN = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    row: TokenRow
    text: str  # nobody will see it again


def make(access: Access, name: str, scope: Scope, project: str | None, lasts_s: float | None, now: float) -> Made:
    """NotFound when there is no such project."""
    secret, expires_at = secrets.token_urlsafe(32), None if lasts_s is None else now + lasts_s
    row = TokenRow(secrets.token_hex(6), name, project, scope, now, expires_at)
    access.add_token(row, digest(secret))
    return Made(row, f"phx_{row.id}_{secret}")


def digest(secret: str) -> str:
    """Of 256 random bits: no salt and no slow hash would make them harder to guess."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Keys:
    """Who holds which token; what was looked up is known for a while."""

    def __init__(
        self, access: Access, root: str, clock: Callable[[], float] = time.time, issuer: Issuer | None = None
    ) -> None:
        self.access, self.root, self.clock, self.issuer = access, root.encode(), clock, issuer
        self.lock = threading.Lock()
        self.known: dict[str, tuple[float, Principal]] = {}  # digest of the whole token -> until when

    def remembered(self, text: str) -> Principal | None:
        """Without a look into the store."""
        if hmac.compare_digest(text.encode(), self.root):
            return ROOT
        until, principal = self.known.get(digest(text), (0.0, None))
        return principal if until > self.clock() else None

    def holder(self, text: str) -> Principal | None:
        """Whose token this is; None: nobody's. StoreUnavailable when that can't be told."""
        if (known := self.remembered(text)) is not None:
            return known
        shaped = SHAPE.fullmatch(text)
        if shaped is None and self.issuer is not None and text.count(".") == 2:
            return self.issuer.holder(text)
        found = self.access.token(shaped[1]) if shaped else None
        if shaped is None or found is None:
            return None
        row, kept = found
        now = self.clock()
        if not hmac.compare_digest(digest(shaped[2]), kept) or row.revoked_at is not None:
            return None
        if row.expires_at is not None and row.expires_at <= now:
            return None
        principal = Principal(f"{row.name} ({row.id})", row.scope, row.project)
        until = min(now + KNOWN_S, row.expires_at or float("inf"))
        with self.lock:
            if len(self.known) >= MOST_KNOWN:
                self.known.clear()
            self.known[digest(text)] = until, principal
        return principal
