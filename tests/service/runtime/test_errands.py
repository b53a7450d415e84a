"""Verification on real files, without a gang; and what stays open until it is answered."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from service.contracts import events
from service.runtime import errands, exporter
from service.runtime.errands import Answered, Errands
from service.store.records import Intent
from workers.checkpoint import manifest, shards
from workers.checkpoint.manifest import Manifest
from workers.checkpoint.shards import Piece, Region
from workers.checkpoint.storage import Storage

pytestmark = pytest.mark.ray

DATA = {"step": 4, "attempt": 1, "manifest": manifest.path(4, 1)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Manifest:
    """Of one shard of 2 MiB and a bit, published in the folder of job `a`."""
    storage = Storage.open(str(tmp_path / "a"))
    size = (2 << 20) + 100
    piece = Piece(Region("model.w", (size,), "uint8", (0,), (0,), (size,)), lambda: b"\x07" * size)
    record = shards.write(storage, manifest.folder(4, 1, "t"), 0, [piece])
    plain = {"layout": {}, "model": {}, "header": {}, "created_at": 0.0}
    made = manifest.assemble(storage, job="a", step=4, attempt=1, token="t", records=[record], **plain)
    manifest.publish(storage, made)
    return made


def damage(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def wish(kind: str = "verify", **data: object) -> Intent:
    return Intent(7, "a", kind, 1.0, {**DATA, **data})


@pytest.mark.parametrize(
    ("file", "at", "says"),
    [
        (None, 0, ""),
        ("shard", 0, "bytes 0 to"),
        ("shard", (2 << 20) + 99, "to 2097252"),
        ("index", 40, "digest"),
        ("manifest", 100, "the manifest"),
    ],
)
def test_every_byte_is_checked(tmp_path: Path, checkpoint: Manifest, file: str | None, at: int, says: str) -> None:
    (shard,) = checkpoint.shards
    paths = {"shard": shard.path, "index": shard.index, "manifest": checkpoint.path}
    if file is not None:
        damage(tmp_path / "a" / paths[file], at)
    event = errands.verified(wish(), str(tmp_path / "a"))
    if file is None:
        assert event == events.CheckpointVerified("a", 1, 4, checkpoint.path, event.at)
    else:
        assert isinstance(event, events.CheckpointRejected)
        assert (event.uid, event.attempt, event.manifest) == ("a", 1, checkpoint.path)
        assert says in event.reason


def test_a_shard_that_is_missing_is_found(tmp_path: Path, checkpoint: Manifest) -> None:
    (tmp_path / "a" / checkpoint.shards[0].path).unlink()
    event = errands.verified(wish(), str(tmp_path / "a"))
    assert isinstance(event, events.CheckpointRejected)
    assert "missing" in event.reason


def answer(wish: Intent, folder: Path) -> events.CheckpointFact:
    inbox: queue.SimpleQueue[Answered] = queue.SimpleQueue()
    here = Errands(inbox)
    here.begin(wish, str(folder))
    assert here.open == {7}
    told = inbox.get(timeout=20)
    assert (told.intent, here.open) == (7, {7})  # until it is in the store
    here.answered([7])
    here.close()
    assert not here.open
    return told.event


def test_storage_that_is_away_condemns_nothing(tmp_path: Path, checkpoint: Manifest) -> None:
    event = answer(wish(), tmp_path / "not-mounted")
    assert isinstance(event, events.CheckpointCheckFailed)
    assert "is not in" in event.reason
    file = tmp_path / "file"
    file.write_text("")
    assert isinstance(answer(wish(), file), events.CheckpointCheckFailed)
    assert isinstance(answer(wish(), tmp_path / "a"), events.CheckpointVerified)


def test_nothing_is_told_once_the_reign_is_over(tmp_path: Path, checkpoint: Manifest) -> None:
    inbox: queue.SimpleQueue[Answered] = queue.SimpleQueue()
    here = Errands(inbox)
    here.over.set()
    here.begin(wish(), str(tmp_path / "a"))
    here.lanes.pool.shutdown(wait=True)
    assert inbox.empty()


def test_what_can_not_be_exported_says_why(tmp_path: Path, checkpoint: Manifest) -> None:
    told = exporter.export(str(tmp_path / "a"), checkpoint.path, str(tmp_path / "out"), None)
    assert "validation error" in told  # its model is none
    assert "missing" in exporter.export(str(tmp_path / "a"), manifest.path(5, 1), str(tmp_path / "out"), None)
    failed = errands.failed(wish("export", to="/out", dtype=None), "why")
    assert failed == events.CheckpointExportFailed("a", 4, checkpoint.path, "/out", "why", failed.at)
