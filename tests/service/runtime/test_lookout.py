"""Who is known to be gone before Ray knows it: real doors on the loopback, opened and shut."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from service.contracts.cluster import Fleet
from service.runtime import lookout
from service.runtime.lookout import Lookout


@pytest.fixture
def door() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def row(name: str, door: socket.socket | tuple[str, int]) -> dict[str, Any]:
    address, port = door if isinstance(door, tuple) else door.getsockname()
    return {
        "NodeID": f"id-{name}", "Alive": True, "NodeManagerAddress": address, "NodeManagerPort": port,
        "NodeManagerHostname": "host", "Labels": {"phalanx.io/node": name}, "Resources": {"CPU": 2.0},
    }  # fmt: skip


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Ray's table says."""
    table: list[dict[str, Any]] = []
    monkeypatch.setattr(lookout.ray, "nodes", lambda: list(table))
    monkeypatch.setattr(lookout.state, "get_draining_nodes", dict)
    return table


def names(fleet: Fleet) -> list[str]:
    return [node.name for node in fleet.nodes]


def test_a_door_that_shuts_is_a_node_that_is_gone_for_good(rows: list[dict[str, Any]], door: socket.socket) -> None:
    rows.append(row("n0", door))
    look = Lookout()
    assert names(look.fleet()) == ["n0"]
    address = door.getsockname()
    door.close()
    assert names(look.fleet()) == ["n0"]  # nothing makes it doubt
    look.doubt.set()
    assert names(look.fleet()) == []
    with socket.create_server(address):  # somebody else
        look.doubt.set()
        assert names(look.fleet()) == []
    assert not look.doubt.is_set()


def test_a_door_that_was_never_open_says_nothing(rows: list[dict[str, Any]], door: socket.socket) -> None:
    address = door.getsockname()
    door.close()
    rows.append(row("n0", address))
    look = Lookout()
    look.doubt.set()
    assert names(look.fleet()) == ["n0"]


def test_a_host_that_is_silent_is_left_to_ray(
    rows: list[dict[str, Any]], door: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows.append(row("n0", door))
    look = Lookout()
    look.fleet()
    monkeypatch.setattr(lookout.socket, "create_connection", _times_out)
    look.doubt.set()
    assert names(look.fleet()) == ["n0"]


def test_doubt_has_it_look_at_once(
    rows: list[dict[str, Any]], door: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "WATCH_S", 60.0)
    rows.append(row("n0", door))
    look, over, told = Lookout(), threading.Event(), threading.Semaphore(0)
    known, found = look.fleet(), list[Fleet]()

    def tell(fleet: Fleet) -> None:
        found.append(fleet)
        told.release()

    thread = threading.Thread(target=look.watch, args=(known, tell, over))
    thread.start()
    door.close()
    look.doubt.set()
    assert told.acquire(timeout=10)
    assert names(found[0]) == []
    over.set()
    look.doubt.set()
    thread.join(10)
    assert not thread.is_alive()


def _times_out(*_: Any) -> None:
    raise TimeoutError
