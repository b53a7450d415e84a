from __future__ import annotations

import dataclasses
import queue
import threading
import time
from pathlib import Path

import pytest

from service.contracts import events
from service.contracts.job import Phase
from service.core.state import Job, Restored
from service.runtime import hands
from service.runtime.ear import Complete
from service.settings import Settings
from tests.e2e.world import until
from tests.service.core import world
from tests.service.core.world import World
from workers.checkpoint import manifest, retention, shards
from workers.checkpoint.shards import Piece, Region
from workers.checkpoint.storage import Storage
from workers.reports import ShardSaved

pytestmark = pytest.mark.ray

NAMES = [f"manifests/{step:010d}-000001.json" for step in (30, 20, 10)]


def storage(root: Path, *names: str) -> Storage:
    made = Storage.open(str(root))
    for name in names:
        made.create(name, b"{}")
    return made


@pytest.mark.parametrize(
    ("there", "newest", "rejected", "found"),
    [
        ([], None, (), ()),
        (NAMES, None, (), tuple(NAMES)),  # published, and the word of it lost
        (NAMES, NAMES[0], (), tuple(NAMES)),
        (NAMES[1:], NAMES[0], (), tuple(NAMES[1:])),
        (NAMES, NAMES[1], (NAMES[0],), tuple(NAMES[1:])),
        (NAMES, None, tuple(NAMES), ()),  # all of them were bad: from the seed
    ],
)
def test_what_may_be_continued_at(
    tmp_path: Path, there: list[str], newest: str | None, rejected: tuple[str, ...], found: tuple[str, ...]
) -> None:
    assert hands.resumable(storage(tmp_path, *there), newest, rejected) == found


RESTORED = [
    # went back to step 20 of attempt 1, when attempt 1, or 2, was the newest
    (Restored(20, 1, 1), ["20-1", "10-1"], ["30-1"]),
    (Restored(20, 1, 1), ["40-2", "30-2", "20-1"], ["30-1"]),  # what came after it is good, also of undone steps
    (Restored(20, 1, 2), ["20-1"], ["20-2", "30-2"]),
    (Restored(20, 2, 2), ["20-2", "20-1"], ["30-1"]),
    (Restored(20, 1, 1), [], ["30-1"]),
]


@pytest.mark.parametrize(("restored", "found", "undone"), RESTORED)
def test_what_was_undone_is_not_continued_at_though_it_was_published(
    tmp_path: Path, restored: Restored, found: list[str], undone: list[str]
) -> None:
    def paths(names: list[str]) -> list[str]:
        return [manifest.path(*(int(part) for part in name.split("-"))) for name in names]

    here = storage(tmp_path, *paths([*found, *undone]))
    assert hands.resumable(here, None, (), restored) == tuple(paths(found))
    assert hands.undone(here, restored) == set(paths(undone))
    assert hands.undone(here, None) == set()


def test_no_more_than_a_few_are_walked_back_over(tmp_path: Path) -> None:
    names = [f"manifests/{step:010d}-000001.json" for step in range(20)]
    assert hands.resumable(storage(tmp_path, *names), None, ()) == tuple(reversed(names))[: hands.RESUME_FROM]


def test_storage_that_lost_all_is_not_a_new_beginning(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="holds no checkpoint: is it mounted"):
        hands.resumable(storage(tmp_path / "job"), NAMES[0], ())
    (tmp_path / "job").write_text("a file")
    with pytest.raises(NotADirectoryError):
        hands.resumable(storage(tmp_path / "job"), None, ())


def saved(here: Storage, step: int) -> Complete:
    """One rank's shard of a kilobyte."""
    piece = Piece(Region("model.w", (1024,), "uint8", (0,), (0,), (1024,)), lambda: bytes(1024))
    record = shards.write(here, manifest.folder(step, 1, "1"), 0, [piece])
    return Complete(step, (ShardSaved(step, 0, record.index, record.digest, record.nbytes, {"step": step}, 0.0),))


@pytest.mark.parametrize(
    ("loading", "undone", "kept"),
    [
        ((), (), [40, 30]),
        ((10,), (), [40, 30, 10]),  # an attempt may be reading it
        ((), (30,), [40, 30, 20]),  # what was undone is not counted
    ],
)
def test_what_is_published_says_its_size_and_what_is_loaded_stays(
    tmp_path: Path, loading: tuple[int, ...], undone: tuple[int, ...], kept: list[int]
) -> None:
    here = World(world.fleet(1))
    here.bring(Phase.RUNNING, job=world.job_spec(checkpoint={"keep": 2}))
    job = dataclasses.replace(here.job(), rejected=tuple(manifest.path(step, 1) for step in undone))
    inbox: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
    made = hands.Hands(1, Settings.read({"PHALANX_HOME": str(tmp_path)}), inbox)
    made.loading["a"] = tuple(manifest.path(step, 1) for step in loading)
    storage_of_job = Storage.open(str(tmp_path / "runs")).child("a")
    for step in (10, 20, 30, 40):
        made._publish(job, saved(storage_of_job, step))
        told = inbox.get_nowait()
        assert told == events.CheckpointPublished("a", 1, step, manifest.path(step, 1), told.at, nbytes=1024)
    assert manifest.published(storage_of_job) == [manifest.path(step, 1) for step in kept]
    made.close()


def test_shards_stay_while_an_earlier_attempt_may_still_publish_them(tmp_path: Path) -> None:
    job = dataclasses.replace(World(world.fleet(1)).bring(Phase.RUNNING), attempt=2)
    made = hands.Hands(1, Settings.read({"PHALANX_HOME": str(tmp_path)}), queue.SimpleQueue())
    here = Storage.open(str(tmp_path / "runs")).child("a")
    saved(here, 4)
    late = threading.Event()
    made.lanes.submit("publish a 1", lambda: late.wait(10))
    made._tidy(job)
    assert len(here.names(manifest.FOLDERS)) == 2
    late.set()
    until(lambda: not made.publishing("a", 1), "end of the publication")
    made._tidy(job)
    assert here.names(manifest.FOLDERS) == []
    made.close()


def test_what_the_next_attempt_loads_stays_from_the_end_of_the_last_one_until_it_has(tmp_path: Path) -> None:
    here = World(world.fleet(1))
    here.bring(Phase.RUNNING)
    here.gang(events.CheckpointPublished, step=4, manifest="m4")
    made = hands.Hands(1, Settings.read({"PHALANX_HOME": str(tmp_path)}), queue.SimpleQueue())
    made.close()  # nothing is begun
    made.do(here.fault().commands[0], here.job(), here.state.fleet)
    assert made.loading == {"a": ("m4",)}
    made.resumed("a")
    assert made.loading == {}


def forked(tmp_path: Path, step: int = 4) -> Job:
    start = {"job": "b", "root": str(tmp_path / "runs"), "manifest": manifest.path(step, 1)}
    return World(world.fleet(1)).bring(Phase.PLACING, job=world.job_spec(init_from=start))


def test_a_fork_holds_the_other_jobs_checkpoint_until_it_is_loaded(tmp_path: Path) -> None:
    parent = storage(tmp_path / "runs" / "b", manifest.path(4, 1))
    made = hands.Hands(1, Settings.read({"PHALANX_HOME": str(tmp_path)}), queue.SimpleQueue())
    for _ in range(2):  # a start that was refused is tried again
        assert made._origin(forked(tmp_path), needed=True) == (parent.uri, manifest.path(4, 1))
        assert retention.held(parent, time.time()) == {manifest.path(4, 1)}
    assert len(parent.names("holds")) == 1
    made.resumed("a")
    made.lanes.pool.shutdown(wait=True)
    assert parent.names("holds") == []
    assert made._origin(forked(tmp_path), needed=False) is not None  # it has checkpoints of its own
    assert parent.names("holds") == []
    with pytest.raises(FileNotFoundError, match="was it removed"):
        made._origin(forked(tmp_path, step=8), needed=True)
    assert made._origin(World(world.fleet(1)).bring(Phase.PLACING), needed=True) is None


@pytest.mark.parametrize("lost", [True, False])
def test_what_a_rank_writes_late_on_a_node_that_was_given_up_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    here = World(world.fleet(2))
    here.bring(Phase.RUNNING, job=world.spec(slots=2, steps=4, elastic=True))
    if lost:
        here.observe(world.without(here.state.fleet, "n0"))
        here.stopped()
        here.start(resumed=4)
    here.gang(events.GangFinished)
    here.stopped()
    made = hands.Hands(1, Settings.read({"PHALANX_HOME": str(tmp_path)}), queue.SimpleQueue())
    monkeypatch.setattr(made, "_sweep", lambda owned, alive: None)
    late = tmp_path / "runs/a/checkpoints/0000000020/1-1/rank-00000.bin"
    try:
        made.tidy(here.job())
        made.lanes.submit(hands._publishing("a", here.job().attempt), lambda: late.parent.mkdir(parents=True))
        made.lanes.submit(hands._publishing("a", here.job().attempt), lambda: late.write_bytes(b"x"))
        made.sweep(set(), set(), here.state.fleet)
        made.lanes.submit(hands._publishing("a", here.job().attempt), (done := threading.Event()).set)
        assert done.wait(20)
        assert late.exists() is not lost
        monkeypatch.setattr(hands, "LATE_S", 0.0)
        made.sweep(set(), set(), here.state.fleet)
        assert made.ended == {}
    finally:
        made.close()
