"""One API process: the store opened, the token made, the socket bound, its address left for clients."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from pathlib import Path
from types import FrameType

import uvicorn

from api import app, auth, oidc
from api.hub import Hub
from api.rules import Rules
from service.contracts import errors
from service.settings import Settings
from service.store.jobs import Store

GRACE_S = 5  # for requests under way at SIGTERM; streams are ended at once, and their readers resume


class Server(uvicorn.Server):
    """Writes `{"url": ...}` to `announcement` once it listens: only then is there something to connect to."""

    def __init__(self, config: uvicorn.Config, announcement: Path, url: str, drain_s: float = 0.0) -> None:
        super().__init__(config)
        self._announcement, self._url, self._drain_s = announcement, url, drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not ready any more, and its streams end; what else comes is answered until it has been noticed."""
        hub: Hub | None = getattr(self.config.app.state, "hub", None)  # type: ignore[union-attr]
        first = hub is not None and not hub.closing
        if hub is not None:
            hub.close()
        if first and self._drain_s:
            threading.Timer(self._drain_s, super().handle_exit, (sig, frame)).start()
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        draft = self._announcement.with_name(f".{self._announcement.name}-{secrets.token_hex(8)}")
        draft.write_text(json.dumps({"url": self._url, "pid": os.getpid()}) + "\n")
        draft.replace(self._announcement)


def run(settings: Settings) -> None:
    """Serve until a signal ends it. Port 0 takes a free one; `{home}/api.json` says which."""
    settings.home.mkdir(parents=True, exist_ok=True)
    token = auth.load_or_create_token(settings.home)
    listener = listen(settings.api_host, settings.api_port)
    store = Store.open(settings.store)
    try:
        config = uvicorn.Config(
            app.create_app(store, token, settings.storage, rules(settings)),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        url = _url(settings.api_host, listener.getsockname()[1])
        Server(config, settings.home / "api.json", url, settings.api_drain_s).run([listener])
    finally:
        store.close()
        listener.close()


def rules(settings: Settings) -> Rules:
    trust = None
    if settings.oidc_issuer:
        trust = oidc.Trust(settings.oidc_issuer, settings.oidc_audience, oidc.roles(settings.oidc_groups))
    return Rules(
        settings.allowed_roots, settings.models, trust, settings.api_per_s, settings.own_code, settings.secrets
    )


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only where the protocol is named: 40 ms an answer otherwise.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise errors.UserError(
            f"the API can't listen on {host}:{port}: {error.strerror or error}",
            hint="is another API running there? PHALANX_API_PORT names another port",
            field="PHALANX_API_PORT",
        ) from None
    return listener


def _url(host: str, port: int) -> str:
    """Where a client on this machine connects: a server on every address is reached by the loopback one."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"
