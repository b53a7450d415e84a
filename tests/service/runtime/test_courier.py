"""Files over the loopback: all of them and the note, or an error on the side that sends."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.runtime import courier
from service.runtime.courier import Porter


class Desk:
    """What came in."""

    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []
        self.refuse: Exception | None = None

    def kept(self, note: dict[str, Any]) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.notes.append(note)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def porter(tmp_path: Path, desk: Desk) -> Iterator[Porter]:
    made = Porter("127.0.0.1", tmp_path / "in", desk.kept)
    yield made
    made.close()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    made = {"a/empty": b"", "a/small.json": b"{}", "b/large.bin": os.urandom(3 * courier.CHUNK + 5)}
    for name, data in made.items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_bytes(data)
    return {name: tmp_path / "out" / name for name in made}


def test_every_byte_and_the_note_arrive(porter: Porter, desk: Desk, files: dict[str, Path], tmp_path: Path) -> None:
    courier.send(porter.door, files, {"step": 7})
    assert desk.notes == [{"step": 7}]
    for name, path in files.items():
        assert (tmp_path / "in" / name).read_bytes() == path.read_bytes()


def test_what_the_receiver_says_is_the_senders_error(porter: Porter, desk: Desk, files: dict[str, Path]) -> None:
    desk.refuse = ValueError("no room")
    with pytest.raises(OSError, match="ValueError: no room"):
        courier.send(porter.door, files, {})
    desk.refuse = None
    courier.send(porter.door, files, {"again": True})
    assert desk.notes == [{"again": True}]


def test_who_does_not_know_the_word_gets_nothing_in(porter: Porter, desk: Desk, files: dict[str, Path]) -> None:
    with pytest.raises(ConnectionError):
        courier.send(dataclasses.replace(porter.door, word="guess"), files, {})
    assert desk.notes == []


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", courier.LENGTH.pack(3) + b"no!", b"\xff" * 8])
def test_a_stranger_is_shown_out(porter: Porter, desk: Desk, files: dict[str, Path], data: bytes) -> None:
    cut_off = contextlib.suppress(OSError)  # what it said was not heard to its end
    with cut_off, socket.create_connection((porter.door.host, porter.door.port), 10) as stranger:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""
    courier.send(porter.door, files, {"step": 1})
    assert desk.notes == [{"step": 1}]


def test_a_sender_that_breaks_off_leaves_no_note(porter: Porter, desk: Desk) -> None:
    header = {"word": porter.door.word, "files": {"x": 100}, "note": {}}
    with socket.create_connection((porter.door.host, porter.door.port), 10) as link:
        courier._say(link, header)
        link.sendall(b"half")
        link.shutdown(socket.SHUT_WR)
        assert "96 bytes early" in courier._heard(link)["error"]
    assert desk.notes == []


def test_a_porter_that_is_gone(porter: Porter, files: dict[str, Path]) -> None:
    door = porter.door
    porter.close()
    with pytest.raises(ConnectionRefusedError):
        courier.send(door, files, {})
