"""The saver: copies now, writes later, reports always, never disturbs training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.workers.memory import Shelf
from workers import reports
from workers.checkpoint import logical, manifest, shards
from workers.checkpoint.retry import Retry
from workers.checkpoint.saver import Saver
from workers.checkpoint.storage import LocalStorage, Storage
from workers.spec import Assignment, DataSpec, ModelSpec, RunSpec, TrainSpec

pytestmark = pytest.mark.torch

ONCE = Retry(0.0)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def assignment(tmp_path) -> Assignment:
    run = RunSpec(
        model=ModelSpec(layers=1, hidden=8, heads=2, seq_len=8, vocab_size=16),
        data=DataSpec(),
        train=TrainSpec(steps=1),
    )
    return Assignment("job-1", 2, "9f3c", 0, run, str(tmp_path), "127.0.0.1", 1)


class Gate(LocalStorage):
    """Writes wait until the gate is opened."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.opened = threading.Event()

    def create(self, path: str, data: bytes) -> None:
        assert self.opened.wait(30)
        super().create(path, data)


class Broken(LocalStorage):
    def create(self, path: str, data: bytes) -> None:
        raise OSError(28, "No space left on device", path)


def as_kind(storage: Storage, kind: type[LocalStorage]) -> LocalStorage:
    return kind(storage.fs, storage.root, storage.uri)


def publish(storage: Storage, saved: reports.ShardSaved) -> manifest.Manifest:
    made = manifest.assemble(
        storage,
        job="job-1",
        step=saved.step,
        attempt=2,
        token="9f3c",
        layout={},
        model={},
        header=saved.header,
        records=[shards.ShardRecord(saved.index, saved.index_digest, saved.nbytes)],
        created_at=0.0,
    )
    manifest.publish(storage, made)
    return made


def loaded(storage: Storage, made: manifest.Manifest, like: torch.Tensor) -> torch.Tensor:
    blank = torch.zeros_like(like)
    logical.load({"w": blank}, made, storage)
    return blank


def test_a_save_holds_the_state_as_it_was(storage, assignment):
    gate = as_kind(storage, Gate)
    heard: list[reports.Report] = []
    saver = Saver(gate, assignment, heard.append)
    weight = torch.randn(64, 32)
    before = weight.clone()
    saver.save(5, {"w": weight}, {"w": 1}, {"samples": 40})
    weight.zero_()  # training goes on while nothing is written yet
    assert heard == []
    gate.opened.set()
    saver.close()
    (saved,) = heard
    assert isinstance(saved, reports.ShardSaved)
    assert (saved.step, saved.rank, saved.header) == (5, 0, {"samples": 40})
    assert saved.index == "checkpoints/0000000005/2-9f3c/rank-00000.json"
    assert saved.nbytes == weight.nbytes
    assert 0 <= saved.stall_s < 30
    assert torch.equal(loaded(storage, publish(storage, saved), weight), before)


def test_a_second_save_waits_for_the_first(storage, assignment):
    gate = as_kind(storage, Gate)
    heard: list[reports.Report] = []
    saver = Saver(gate, assignment, heard.append)
    weight = torch.full((8,), 1.0)
    saver.save(1, {"w": weight}, {}, {})
    weight.fill_(2.0)
    second = threading.Thread(target=saver.save, args=(2, {"w": weight}, {}, {}))
    second.start()
    assert heard == []
    gate.opened.set()
    second.join(30)
    saver.close()
    assert [saved.step for saved in heard] == [1, 2]
    for saved in heard:
        assert torch.equal(loaded(storage, publish(storage, saved), weight), torch.full((8,), float(saved.step)))


def test_a_failed_write_is_a_report_and_the_next_save_works(storage, assignment):
    heard: list[reports.Report] = []
    saver = Saver(as_kind(storage, Broken), assignment, heard.append, retry=ONCE)
    saver.save(1, {"w": torch.ones(4)}, {}, {})
    saver.wait()
    saver.storage = storage
    saver.save(2, {"w": torch.ones(4)}, {}, {})
    saver.close()
    delayed, failed, saved = heard
    assert delayed == reports.SaveDelayed(1, 0, failed.reason)
    assert failed == reports.SaveFailed(1, 0, failed.reason)
    assert "OSError: [Errno 28] No space left on device" in failed.reason
    assert isinstance(saved, reports.ShardSaved)
    assert manifest.published(storage) == []


def test_a_state_that_can_not_be_saved_is_a_report(storage, assignment):
    heard: list[reports.Report] = []
    saver = Saver(storage, assignment, heard.append)
    saver.save(1, {"w": torch.ones(4, dtype=torch.complex64)}, {}, {})
    saver.close()
    assert heard == [reports.SaveFailed(1, 0, heard[0].reason)]
    assert "complex64 can't be stored" in heard[0].reason


def test_a_listener_that_fails_is_heard_of(storage, assignment):
    def deaf(report: reports.Report) -> None:
        raise ConnectionError("nobody listens")

    saver = Saver(storage, assignment, deaf)
    saver.save(1, {"w": torch.ones(4)}, {}, {})
    with pytest.raises(ConnectionError, match="nobody listens"):
        saver.close()


@pytest.mark.parametrize("view", [lambda t: t, torch.t, lambda t: t[:, ::2]])
def test_many_saves_use_the_same_memory(storage, assignment, view):
    heard: list[reports.Report] = []
    saver = Saver(storage, assignment, heard.append)
    weight = view(torch.randn(16, 16))
    places = set()
    for step in range(1, 6):
        weight.add_(1)
        saver.save(step, {"w": weight}, {}, {})
        places.add(saver.copies._kept["w"][1].data_ptr())
    saver.close()
    assert len(places) == 1
    assert torch.equal(loaded(storage, publish(storage, heard[-1]), weight), weight)


def test_close_ends_the_thread(storage, assignment):
    saver = Saver(storage, assignment, lambda report: None)
    saver.save(1, {"w": torch.ones(4)}, {}, {})
    saver.close()
    assert not any(thread.name.startswith("checkpoint-write") for thread in threading.enumerate())


class Away(LocalStorage):
    """Refuses so many writes: the first half leaves a shard without its index behind."""

    refusals: list[OSError]

    def create(self, path: str, data: bytes) -> None:
        if self.refusals and path.endswith(".json"):
            raise self.refusals.pop(0)
        super().create(path, data)


def test_f12_storage_that_refuses_for_a_while_is_tried_again_and_training_never_waits(storage, assignment):
    away = as_kind(storage, Away)
    away.refusals = [
        ConnectionError("no answer"), TimeoutError("no answer"), PermissionError(13, "ExpiredToken"),
        OSError(28, "No space left on device"),
    ]  # fmt: skip
    heard: list[reports.Report] = []
    saver = Saver(away, assignment, heard.append, retry=Retry(60.0, first_s=0.01, most_s=0.05))
    weight = torch.randn(64, 32)
    before = weight.clone()
    saver.save(5, {"w": weight}, {}, {"samples": 40})
    weight.zero_()  # the next steps
    saver.close()
    delayed, saved = heard
    assert delayed == reports.SaveDelayed(5, 0, "ConnectionError: no answer")  # once, however often it is tried
    assert torch.equal(loaded(storage, publish(storage, saved), weight), before)


def test_f12_a_save_that_is_due_ends_the_tries_of_the_one_before(storage, assignment):
    away = as_kind(storage, Away)
    away.refusals = [ConnectionError("no answer")] * 3
    heard: list[reports.Report] = []
    saver = Saver(away, assignment, heard.append, retry=Retry(600.0, first_s=300.0, most_s=300.0))
    saver.save(1, {"w": torch.ones(4)}, {}, {})
    until(lambda: heard)
    away.refusals = []
    saver.save(2, {"w": torch.ones(4)}, {}, {})
    saver.close()
    assert [(type(said), said.step) for said in heard] == [
        (reports.SaveDelayed, 1), (reports.SaveFailed, 1), (reports.ShardSaved, 2),
    ]  # fmt: skip


def test_f12_a_save_is_left_out_where_storage_hangs(storage, assignment):
    gate = as_kind(storage, Gate)
    heard: list[reports.Report] = []
    saver = Saver(gate, assignment, heard.append, patience_s=0.05)
    for step in (1, 2):
        saver.save(step, {"w": torch.full((4,), float(step))}, {}, {})
    assert heard == [reports.SaveFailed(2, 0, "the save of step 1 is still being written")]
    gate.opened.set()
    until(lambda: len(heard) == 2)
    saver.save(3, {"w": torch.ones(4)}, {}, {})
    saver.close()
    assert [(type(said), said.step) for said in heard[1:]] == [(reports.ShardSaved, 1), (reports.ShardSaved, 3)]


@pytest.fixture
def shelf(tmp_path) -> Shelf:
    return Shelf(Storage.open(str(tmp_path / "memory")))


def test_storage_is_written_from_memory_and_byte_for_byte_the_same(storage, shelf, assignment):
    gate = as_kind(storage, Gate)
    heard: list[reports.Report] = []
    saver = Saver(gate, assignment, heard.append, shelf)
    weight = torch.randn(64, 32)
    before = weight.clone()
    saver.save(5, {"w": weight}, {"w": 1}, {"samples": 40}, durable=True, snapshot=True)
    until(lambda: heard)
    assert heard == [reports.SnapshotTaken(5, 0, weight.nbytes, heard[0].stall_s)]
    until(lambda: not saver.busy)  # the copies are free, though storage has nothing yet
    weight.zero_()
    saver.save(6, {"w": weight}, {"w": 1}, {"samples": 48}, durable=False, snapshot=True)
    until(lambda: len(heard) == 2)
    gate.opened.set()
    saver.close()
    saved = heard[-1]
    assert [record.step for record in shelf.held] == [5, 6]
    assert saved == shelf.held[0]
    for path in (saved.index, saved.index.replace(".json", ".bin")):
        assert storage.read(path) == shelf.storage.read(path)
    assert torch.equal(loaded(storage, publish(storage, saved), weight), before)
    assert saver.cost_s > 0


def test_a_bit_that_flips_in_memory_never_reaches_storage(storage, shelf, assignment):
    heard: list[reports.Report] = []
    saver = Saver(storage, assignment, heard.append, shelf, retry=ONCE)
    hold = shelf.hold

    def flip(record: reports.ShardSaved) -> None:
        file = Path(shelf.storage.uri) / record.index.replace(".json", ".bin")
        data = bytearray(file.read_bytes())
        data[17] ^= 4
        file.write_bytes(data)
        hold(record)

    shelf.hold = flip
    saver.save(5, {"w": torch.randn(64, 32)}, {}, {}, snapshot=True)
    saver.close()
    assert type(heard[0]) is reports.SnapshotTaken
    assert isinstance(heard[1], reports.SaveFailed)
    assert "fail their checksum" in heard[1].reason
    assert storage.names() == []


@pytest.mark.parametrize("durable", [True, False])
def test_a_snapshot_that_is_not_kept_is_a_report_and_storage_is_written_all_the_same(
    storage, shelf, assignment, durable
):
    heard: list[reports.Report] = []
    saver = Saver(storage, assignment, heard.append, shelf)
    shelf.trouble = OSError("the peer is gone")
    saver.save(5, {"w": torch.ones(4)}, {}, {}, durable=durable, snapshot=True)
    saver.wait()
    assert not saver.busy
    shelf.trouble = None
    saver.save(6, {"w": torch.ones(4)}, {}, {}, durable=False, snapshot=True)
    saver.close()
    assert [(type(said), said.step) for said in heard] == [
        (reports.SnapshotFailed, 5), *([(reports.ShardSaved, 5)] if durable else []), (reports.SnapshotTaken, 6),
    ]  # fmt: skip
    assert heard[0].reason == "OSError: the peer is gone"


def test_memory_that_is_too_small_is_said_once_and_never_asked_again(storage, shelf, assignment):
    shelf.room = 8
    heard: list[reports.Report] = []
    saver = Saver(storage, assignment, heard.append, shelf)
    for step in (1, 2):
        saver.save(step, {"w": torch.ones(4)}, {}, {}, snapshot=True)
    saver.wait()
    assert saver.lacking  # all ranks leave snapshots alone where one can't take them
    saver.close()
    assert heard[0] == reports.SnapshotFailed(1, 0, "16 bytes do not fit")
    assert [type(said) for said in heard[1:]] == [reports.ShardSaved, reports.ShardSaved]
    assert shelf.storage.names() == []
