"""The saver: copies now, writes later, reports always, never disturbs training."""

from __future__ import annotations

import threading

import pytest
import torch

from workers import reports
from workers.checkpoint import logical, manifest, shards
from workers.checkpoint.saver import Saver
from workers.checkpoint.storage import LocalStorage, Storage
from workers.spec import Assignment, DataSpec, ModelSpec, RunSpec, TrainSpec

pytestmark = pytest.mark.torch


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
    saver.save(5, {"w": weight}, {"w": (1, 0)}, {"samples": 40})
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
    saver = Saver(as_kind(storage, Broken), assignment, heard.append)
    saver.save(1, {"w": torch.ones(4)}, {}, {})
    saver.wait()
    saver.storage = storage
    saver.save(2, {"w": torch.ones(4)}, {}, {})
    saver.close()
    failed, saved = heard
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
        places.add(saver._copies["w"][1].data_ptr())
    saver.close()
    assert len(places) == 1
    assert torch.equal(loaded(storage, publish(storage, heard[-1]), weight), weight)


def test_close_ends_the_thread(storage, assignment):
    saver = Saver(storage, assignment, lambda report: None)
    saver.save(1, {"w": torch.ones(4)}, {}, {})
    saver.close()
    assert not any(thread.name.startswith("checkpoint-write") for thread in threading.enumerate())
