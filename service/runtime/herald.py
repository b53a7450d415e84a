"""Tells webhooks of events: signed, in order, again until they are taken. Of the controller that leads.

A delivery is one event as JSON. `Phalanx-Signature` is `t=<seconds>,v1=<hex>`, an HMAC-SHA256 of `<seconds>.<body>`;
`Phalanx-Delivery` names hook and event, the same in each try. An event that is not taken for a day is passed over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import ipaddress
import json
import logging
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable

import httpx

from service.contracts.errors import ClusterError, StoreUnavailable
from service.runtime import references
from service.store.hooks import Hooks
from service.store.records import EventRow, HookRow

log = logging.getLogger("phalanx.herald")

POLL_S = 0.5
ANSWER_S = 10.0
BATCH = 50
PAUSE_MOST_S = 300.0
GIVEN_UP_S = 86_400.0


class Herald:
    def __init__(self, hooks: Hooks, clock: Callable[[], float] = time.time) -> None:
        self.hooks, self.clock = hooks, clock
        self.not_before: dict[str, float] = {}  # hook -> when it is tried again
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="herald", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        self.over.set()

    def turn(self) -> None:
        """Everyone whose time has come is told what is due."""
        with httpx.Client(timeout=ANSWER_S, follow_redirects=False, trust_env=False) as client:
            for hook in self.hooks.all():
                if self.clock() >= self.not_before.get(hook.id, 0.0) and not self.over.is_set():
                    self._tell(client, hook)

    def _tell(self, client: httpx.Client, hook: HookRow) -> None:
        for event in self.hooks.due(hook, BATCH):
            try:
                self._deliver(client, hook, event)
            except (httpx.HTTPError, OSError, ClusterError) as error:
                if not self._given_up(hook):
                    self.hooks.failed(hook, f"event {event.id}: {error or type(error).__name__}", self.clock())
                    self.not_before[hook.id] = self.clock() + min(PAUSE_MOST_S, 2.0 ** min(hook.failures, 10))
                    return
                log.warning("webhook %s does not take event %d: it is passed over", hook.id, event.id)
            self.hooks.told(hook.id, event.id)
            hook = dataclasses.replace(hook, failures=0, failing_since=None)

    def _given_up(self, hook: HookRow) -> bool:
        return hook.failing_since is not None and self.clock() - hook.failing_since > GIVEN_UP_S

    def _deliver(self, client: httpx.Client, hook: HookRow, event: EventRow) -> None:
        reachable(hook.url)
        body = json.dumps(dataclasses.asdict(event), separators=(",", ":")).encode()
        at = int(self.clock())
        headers = {
            "Content-Type": "application/json",
            "Phalanx-Delivery": f"{hook.id}/{event.id}",
            "Phalanx-Signature": f"t={at},v1={signature(references.value(hook.secret).encode(), at, body)}",
        }
        answer = client.post(hook.url, content=body, headers=headers)
        if not answer.is_success:
            raise ClusterError(f"{hook.url} answered {answer.status_code}")

    def _run(self) -> None:
        while not self.over.wait(POLL_S):
            try:
                self.turn()
            except StoreUnavailable as error:
                log.warning("the store is away: %s", error)
            except Exception:
                log.exception("telling webhooks")


def signature(key: bytes, at: int, body: bytes) -> str:
    return hmac.new(key, b"%d.%b" % (at, body), hashlib.sha256).hexdigest()


def reachable(url: str) -> None:
    """ClusterError for addresses that are the machine's own business: metadata services are link-local."""
    parts = urllib.parse.urlsplit(url)
    for *_, address in socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_STREAM):
        if ipaddress.ip_address(address[0]).is_link_local:
            raise ClusterError(f"{parts.hostname} is a link-local address: nothing is sent there")
