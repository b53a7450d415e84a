from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.runtime import logs
from service.runtime.logs import Chunk, Shipper
from workers.checkpoint.storage import Storage

Refusal = Callable[["Flaky", str, bytes], None]


class Flaky:
    """Storage whose creates go through `refusals` first, one each."""

    def __init__(self, storage: Storage, *refusals: Refusal) -> None:
        self.storage, self.refusals = storage, list(refusals)

    def create(self, path: str, data: bytes) -> None:
        if self.refusals:
            self.refusals.pop(0)(self, path, data)
        else:
            self.storage.create(path, data)

    def read(self, path: str) -> bytes:
        return self.storage.read(path)


def away(there: Flaky, path: str, data: bytes) -> None:
    raise OSError("storage is away")


def answer_lost(there: Flaky, path: str, data: bytes) -> None:
    there.storage.create(path, data)
    raise OSError("connection reset")


def sent_twice(there: Flaky, path: str, data: bytes) -> None:
    there.storage.create(path, data)
    raise FileExistsError(path)


def cut_short(there: Flaky, path: str, data: bytes) -> None:
    there.storage.create(path, data[: len(data) // 2])
    raise OSError("connection reset")


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage.open(str(tmp_path / "storage"))


@pytest.fixture
def node(tmp_path: Path) -> Path:
    folder = tmp_path / "node"
    folder.mkdir()
    return folder


def write(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def shipper(node: Path, storage: Any, **options: Any) -> Shipper:
    return Shipper(node, storage, 3, "n1", **options)


def rows(storage: Storage, chunks: list[Chunk]) -> list[dict[str, Any]]:
    """The lines of all chunks, as a reader finds them."""
    found = []
    for chunk in chunks:
        lines = storage.read(chunk.path).decode().removesuffix("\n").split("\n")
        assert len(lines) == chunk.lines
        found += [json.loads(line) for line in lines]
    return found


def texts(storage: Storage, chunks: list[Chunk]) -> list[str]:
    return [row["text"] for row in rows(storage, chunks)]


CONTENT = [
    # what a rank wrote; the lines shipped while it runs; and those at the end
    (b"", [], []),
    (b"one\n", ["one"], []),
    (b"one\ntwo\n", ["one", "two"], []),
    (b"one\ntw", ["one"], ["tw"]),
    (b"on", [], ["on"]),
    (b"\n", [""], []),
    (b"one\n\n\ntwo\n", ["one", "", "", "two"], []),
    ("schön \u2028 ★\n".encode(), ["schön \u2028 ★"], []),
    (b"a\xff\xfeb\n", ["a\ufffd\ufffdb"], []),
    (b"10%\r20%\x0c\x1e30%\n", ["10%\r20%\x0c\x1e30%"], []),
    (b"nul \x00 end\n", ["nul \x00 end"], []),
]


@pytest.mark.parametrize(("data", "running", "ended"), CONTENT)
def test_whole_lines_and_at_the_end_the_rest(
    node: Path, storage: Storage, data: bytes, running: list[str], ended: list[str]
) -> None:
    ship = shipper(node, storage)
    write(node / "0.out", data)
    assert texts(storage, list(ship.ship())) == running
    assert ship.done() == (not ended)
    assert texts(storage, list(ship.ship(last=True))) == ended
    assert ship.done()
    assert list(ship.ship(last=True)) == []


def test_ranks_and_streams_are_told_apart(node: Path, storage: Storage) -> None:
    for name in ("0.out", "0.err", "12.out", "core.12", "0.txt", "notes"):
        write(node / name, f"{name}\n".encode())
    chunks = list(shipper(node, storage).ship())
    found = rows(storage, chunks)
    assert [(row["rank"], row["stream"], row["text"]) for row in found] == [
        (0, "err", "0.err"),
        (0, "out", "0.out"),
        (12, "out", "12.out"),
    ]
    assert {(row["attempt"], row["node"]) for row in found} == {(3, "n1")}
    assert [chunk.path for chunk in chunks] == [f"logs/000003-n1/{number:06d}.jsonl" for number in range(3)]
    assert {(chunk.attempt, chunk.node) for chunk in chunks} == {(3, "n1")}


def test_there_may_be_nothing_yet(tmp_path: Path, storage: Storage) -> None:
    ship = shipper(tmp_path / "not-there", storage)
    assert list(ship.ship(last=True)) == []
    assert ship.done()


def test_a_file_that_grows(node: Path, storage: Storage) -> None:
    ship, found = shipper(node, storage), list[Chunk]()
    for piece in (b"on", b"e\ntwo\nth", b"", b"ree", b"\n", b"four\n"):
        write(node / "1.err", piece)
        found += ship.ship()
    assert texts(storage, found) == ["one", "two", "three", "four"]


def test_no_chunk_is_larger_than_the_limit(node: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CHUNK_BYTES", 16)
    lines = [f"line {number}" for number in range(10)]
    write(node / "0.out", "".join(f"{line}\n" for line in lines).encode())
    chunks = list(shipper(node, storage).ship())
    assert [chunk.lines for chunk in chunks] == [2] * 5
    assert texts(storage, chunks) == lines


@pytest.mark.parametrize("text", ["0123456789" * 5, "ä" * 25, "xä" * 16, "€" * 16, "𝄞" * 12])
def test_a_line_longer_than_a_chunk_is_cut_between_characters(
    node: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(logs, "CHUNK_BYTES", 15)
    write(node / "0.out", f"{text}\nnext\n".encode())
    *pieces, after = texts(storage, list(shipper(node, storage).ship()))
    assert ("".join(pieces), after) == (text, "next")
    assert len(pieces) > 1


def test_past_the_cap_one_line_says_so(node: Path, storage: Storage) -> None:
    ship = shipper(node, storage, cap=20)
    write(node / "0.out", b"0123456789\n")
    write(node / "1.out", b"short\n")
    first = texts(storage, list(ship.ship()))
    write(node / "0.out", b"0123456789\n")
    second = texts(storage, list(ship.ship()))
    write(node / "0.out", b"0123456789\n")
    assert first == ["0123456789", "short"]
    assert second[0] == "0123456789"
    assert len(second) == 2
    assert "20 bytes" in second[1]
    assert list(ship.ship(last=True)) == []
    assert ship.done()


@pytest.mark.parametrize(
    "refusals",
    [
        (away,),
        (away, away, away),
        (answer_lost,),
        (sent_twice,),
        (away, answer_lost),
        (cut_short,),
        (cut_short, away, answer_lost),
    ],
)
def test_no_line_is_lost_or_doubled_when_storage_refuses(
    node: Path, storage: Storage, refusals: tuple[Refusal, ...]
) -> None:
    ship, found = shipper(node, Flaky(storage, *refusals)), list[Chunk]()
    written: list[str] = []
    for number in range(len(refusals) + 2):
        written.append(f"line {number}")
        write(node / "0.out", f"{written[-1]}\n".encode())
        try:
            found += ship.ship()
        except OSError:
            assert not ship.done()
    found += ship.ship(last=True)
    assert ship.done()
    assert texts(storage, found) == written
    assert len({chunk.path for chunk in found}) == len(found)


def test_what_arrived_before_a_refusal_is_told(node: Path, storage: Storage) -> None:
    there = Flaky(storage)
    ship, found = shipper(node, there), list[Chunk]()
    for name in ("0.out", "1.out", "2.out"):
        write(node / name, f"{name}\n".encode())

    def refuse_second() -> None:
        for chunk in ship.ship():
            found.append(chunk)
            there.refusals = [away]

    with pytest.raises(OSError, match="away"):
        refuse_second()
    assert texts(storage, found) == ["0.out"]
    found += ship.ship()
    assert texts(storage, found) == ["0.out", "1.out", "2.out"]
