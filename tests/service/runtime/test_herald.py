"""Webhooks against a real listener: signed, in order, again until they are taken."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.contracts.errors import ClusterError, NotFound
from service.runtime import herald, references
from service.runtime.herald import Herald
from service.store.jobs import Store
from service.store.records import Changes, HookRow

KEY = "PHALANX_TEST_HOOK_KEY"


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []  # of the next requests; then 204
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.heard.append((dict(self.headers), body))
                self.send_response(outer.answers.pop(0) if outer.answers else 204)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def reasons(self) -> list[str]:
        return [json.loads(body)["reason"] for _, body in self.heard]


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.server.shutdown()
    made.server.server_close()


class World:
    def __init__(self, folder: Path) -> None:
        self.store = Store.open(f"sqlite:///{folder}/store.sqlite3")
        self.epoch = self.store.acquire("test", 600) or 0
        self.store.access.add_project("vision", None, 1.0)
        for uid, project in (("a", "default"), ("v", "vision")):
            self.store.submit({"name": uid}, uid, uid=uid, at=1.0, status={}, project=project)
        self.now = time.time()
        self.herald = Herald(self.store.hooks, lambda: self.now)

    def hook(self, url: str, project: str | None = None, secret: str = f"env:{KEY}") -> HookRow:
        row = HookRow(
            f"h{len(self.store.hooks.all())}", url, secret, project, ("JobFailed", "IncidentOpened"), self.now
        )
        return self.store.hooks.add(row)

    def say(self, uid: str, reason: str, kind: str = "JobFailed") -> None:
        self.store.commit(self.epoch, Changes(events=[(uid, self.now, kind, reason, {"phase": "failed"})]))

    def only(self) -> HookRow:
        (hook,) = self.store.hooks.all()
        return hook


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv(KEY, "s3cret")
    made = World(tmp_path)
    yield made
    made.store.close()


def test_events_are_told_once_in_order_and_signed(world: World, listener: Listener) -> None:
    world.say("a", "before it was there")
    hook = world.hook(listener.url)
    for reason in ("one", "two"):
        world.say("a", reason)
    world.say("a", "of another type", "StragglerFound")
    for _ in range(3):
        world.herald.turn()
    assert listener.reasons == ["one", "two"]
    headers, body = listener.heard[0]
    at = int(headers["Phalanx-Signature"].split(",")[0].removeprefix("t="))
    assert headers["Phalanx-Signature"] == f"t={at},v1={herald.signature(b's3cret', at, body)}"
    assert headers["Phalanx-Delivery"] == f"{hook.id}/{json.loads(body)['id']}"
    assert json.loads(body)["data"] == {"phase": "failed"}


def test_what_is_not_taken_is_told_again_before_anything_else(world: World, listener: Listener) -> None:
    world.hook(listener.url)
    listener.answers = [500, 302]
    world.say("a", "one")
    world.say("a", "two")
    world.herald.turn()
    assert listener.reasons == ["one"]
    assert (world.only().failures, "answered 500" in world.only().error) == (1, True)
    world.herald.turn()  # not yet
    assert listener.reasons == ["one"]
    for _ in range(2):
        world.now += 5
        world.herald.turn()
    assert listener.reasons == ["one", "one", "one", "two"]
    assert (world.only().failures, world.only().error, world.only().failing_since) == (0, "", None)
    assert len({headers["Phalanx-Delivery"] for headers, _ in listener.heard[:3]}) == 1


def test_what_is_not_taken_for_a_day_is_passed_over(world: World, listener: Listener) -> None:
    world.hook(listener.url)
    listener.answers = [500, 500]
    world.say("a", "one")
    world.say("a", "two")
    world.herald.turn()
    world.now += herald.GIVEN_UP_S + 1
    world.herald.turn()
    assert listener.reasons == ["one", "one", "two"]


def test_one_that_fails_holds_up_no_other(world: World, listener: Listener) -> None:
    world.hook("http://127.0.0.1:9/hook")
    world.hook(listener.url)
    world.say("a", "one")
    world.herald.turn()
    assert listener.reasons == ["one"]
    assert "refused" in world.store.hooks.all()[0].error


def test_a_project_hears_of_its_own_jobs(world: World, listener: Listener) -> None:
    world.hook(listener.url, "vision")
    world.say("a", "of another")
    world.say("v", "mine")
    world.herald.turn()
    assert listener.reasons == ["mine"]
    with pytest.raises(NotFound):
        world.hook(listener.url, "nowhere")


@pytest.mark.parametrize("reference", ["env:NOT_THERE", "file:/no/such/file"])
def test_without_its_secret_nothing_is_sent(world: World, listener: Listener, reference: str) -> None:
    world.hook(listener.url, secret=reference)
    world.say("a", "one")
    world.herald.turn()
    assert listener.heard == []
    assert reference in world.only().error


def test_a_secret_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    assert references.value(f"file:{tmp_path}/key") == "s3cret"


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest", "http://[fe80::1]/"])
def test_s10_nothing_is_sent_to_metadata_services(url: str) -> None:
    with pytest.raises(ClusterError, match="link-local"):
        herald.reachable(url)


def test_one_that_is_removed_hears_nothing_more(world: World, listener: Listener) -> None:
    hook = world.hook(listener.url)
    world.store.hooks.remove(hook.id)
    world.say("a", "one")
    world.herald.turn()
    assert listener.heard == []
    with pytest.raises(NotFound):
        world.store.hooks.remove(hook.id)
