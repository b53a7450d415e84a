"""Where a run continues: at the newest of what memory and storage hold, in any layout, all ranks at the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.pool import Pool, RankError
from tests.workers import memory, runs
from tests.workers.test_trainer import EIGHT, TIGHT, heard, job_storage, losses, train
from workers.checkpoint import manifest
from workers.checkpoint.publisher import Publisher
from workers.checkpoint.storage import Storage
from workers.reports import (
    Finished,
    Paused,
    Recalled,
    Report,
    Resumed,
    SaveDelayed,
    SaveFailed,
    ShardSaved,
    SnapshotRefused,
    SnapshotTaken,
    StepDone,
)
from workers.spec import RunSpec

pytestmark = pytest.mark.torch


Said = list[list[Report]]


def run_of(layout: dict[str, int], steps: int = 6, every: int = 1, durable: int = 4) -> RunSpec:
    train = {"steps": steps, "horizon": 8, "warmup_steps": 2}
    return runs.spec(layout=layout, train=train, checkpoint={"every_steps": durable, "snapshot_every": every})


def remembered(
    pool: Pool, root: Path, run: RunSpec, attempt: int, *snapshots: str, resume: tuple[str, ...] = ()
) -> Said:
    folder = str(root / "memory")
    return pool.run(run.parallel.world, runs.train, str(root), run, attempt, resume, folder, snapshots)


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    root = tmp_path_factory.mktemp("whole")
    return root, remembered(pool, root, run_of(EIGHT), 1)


@pytest.fixture
def copy(whole: tuple[Path, Said], tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole[0], tmp_path / "copy"))


def resumed(said: Said) -> Resumed:
    (only,) = heard(said, Resumed)
    return only


def test_every_step_is_in_memory_and_every_fourth_in_storage(whole: tuple[Path, Said]) -> None:
    for rank in whole[1]:
        assert [said.step for said in rank if isinstance(said, SnapshotTaken)] == [1, 2, 3, 4, 5, 6]
        assert [said.step for said in rank if isinstance(said, ShardSaved)] == [4, 6]
    assert heard(whole[1], SaveFailed) == []


@pytest.mark.parametrize("layout", [EIGHT, {}, {"dp": 3}, {"tp": 2, "dp": 2, "zero": 3}, {"pp": 4}])
def test_a_run_goes_on_from_memory_in_any_layout(pool: Pool, whole: tuple[Path, Said], copy: Path, layout) -> None:
    path = memory.assembled(Storage.open(str(copy / "memory")), 5)
    said = remembered(pool, copy, run_of(layout), 2, path)
    assert resumed(said) == Resumed(5, None)
    (recalled,) = heard(said, Recalled)  # should the first attempt not have been heard
    assert recalled.steps == tuple((1, step) for step in heard(whole[1], StepDone)[:5])
    np.testing.assert_allclose(losses(said)[6], losses(whole[1])[6], **TIGHT)


@pytest.mark.parametrize(("step", "stored"), [(4, [4, 6]), (5, [6]), (6, [6])])
def test_a_checkpoint_that_was_due_and_is_not_published_is_written(
    pool: Pool, copy: Path, step: int, stored: list[int]
) -> None:
    path = memory.assembled(Storage.open(str(copy / "memory")), step)
    said = remembered(pool, copy, run_of({"dp": 2}), 2, path)
    assert [[one.step for one in rank if isinstance(one, ShardSaved)] for rank in said] == [stored] * 2
    assert heard(said, Finished) == [Finished(0, 6), Finished(1, 6)]


def test_of_memory_and_storage_the_newest_is_taken(pool: Pool, copy: Path) -> None:
    run = run_of(EIGHT)
    kept = Storage.open(str(copy / "memory"))
    _, published = train(pool, copy / "other", run_of(EIGHT, steps=4), 1)
    shutil.copytree(copy / "other" / "run", copy / "run", dirs_exist_ok=True)
    stored = published[4]
    assert resumed(remembered(pool, copy, run, 2, memory.assembled(kept, 3), resume=(stored,))) == Resumed(4, stored)
    assert resumed(remembered(pool, copy, run, 3, memory.assembled(kept, 4), resume=(stored,))) == Resumed(4, None)


@pytest.mark.parametrize("harm", ["a flipped bit", "a shard that is gone", "a manifest that is gone"])
def test_f18_what_memory_has_lost_is_said_and_all_ranks_take_the_next_one(pool: Pool, copy: Path, harm: str) -> None:
    kept = Storage.open(str(copy / "memory"))
    newest, older = memory.assembled(kept, 5), memory.assembled(kept, 4)
    (shard,) = (copy / "memory" / "checkpoints" / f"{5:010d}").glob("*/rank-00003.bin")
    match harm:
        case "a flipped bit":
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 1
            shard.write_bytes(data)
        case "a shard that is gone":
            shard.unlink()
        case _:
            kept.delete(newest)
    said = remembered(pool, copy, run_of(EIGHT), 2, newest, older)
    assert resumed(said) == Resumed(4, None)
    (refused,) = heard(said, SnapshotRefused)
    assert refused.step == 5
    assert {"a flipped bit": "checksum"}.get(harm, "missing") in refused.reason


def test_f18_nothing_in_memory_and_nothing_in_storage_is_the_seed(pool: Pool, copy: Path) -> None:
    kept = Storage.open(str(copy / "memory"))
    path = memory.assembled(kept, 5)
    kept.delete("checkpoints")
    said = remembered(pool, copy, run_of({"dp": 2}), 2, path)
    assert resumed(said) == Resumed(0, None)


def test_a_job_without_a_checkpoint_begins_where_another_one_is(pool: Pool, copy: Path, tmp_path: Path) -> None:
    _, published = train(pool, copy / "parent", run_of(EIGHT, steps=4), 1)
    origin = (job_storage(copy / "parent").uri, published[4])
    arguments = (str(tmp_path / "child"), run_of({"dp": 2}), 1, (), "", (), origin)
    child = pool.run(2, runs.train, *arguments)
    assert resumed(child) == Resumed(4, published[4])
    assert list(losses(child)) == [5, 6]


def test_the_origin_comes_after_all_that_is_the_jobs_own(pool: Pool, copy: Path, tmp_path: Path) -> None:
    """A snapshot that rots leaves it the origin, not the seed."""
    _, published = train(pool, copy / "parent", run_of(EIGHT, steps=4), 1)
    origin, folder = (job_storage(copy / "parent").uri, published[4]), copy / "memory"
    path = memory.assembled(Storage.open(str(folder)), 5)
    said = pool.run(2, runs.train, str(tmp_path / "a"), run_of({"dp": 2}), 2, (), str(folder), (path,), origin)
    assert resumed(said) == Resumed(5, None)
    shutil.rmtree(folder / "checkpoints")
    said = pool.run(2, runs.train, str(tmp_path / "b"), run_of({"dp": 2}), 2, (), str(folder), (path,), origin)
    assert resumed(said) == Resumed(4, published[4])


def test_an_origin_that_is_no_good_is_an_error_and_not_the_seed(pool: Pool, copy: Path, tmp_path: Path) -> None:
    _, published = train(pool, copy / "parent", run_of(EIGHT, steps=4), 1)
    home = job_storage(copy / "parent")
    home.delete("checkpoints")
    with pytest.raises(RankError, match=r"at which the job begins, is no good: rank 0: .* missing"):
        pool.run(1, runs.train, str(tmp_path), run_of({}), 1, (), "", (), (home.uri, published[4]))


def test_f12_training_goes_on_while_storage_is_away(pool: Pool, tmp_path: Path) -> None:
    """No answer, then expired credentials, then a full disk: a save is late or left out, and the last one is there."""
    run = run_of({"dp": 2}, every=0, durable=2)
    said = pool.run(2, runs.train_in_an_outage, str(tmp_path), run)
    assert list(losses(said)) == [1, 2, 3, 4, 5, 6]
    for rank in said:
        assert next(one.step for one in rank if isinstance(one, SaveDelayed)) == 2
        saved, failed = ([one.step for one in rank if isinstance(one, kind)] for kind in (ShardSaved, SaveFailed))
        assert sorted(saved + failed) == [2, 4, 6]
        assert 6 in saved
    last = [one for one in heard(said, ShardSaved) if one.step == 6]
    path = Publisher(job_storage(tmp_path), "run", 1, "test", run).publish(6, last)
    manifest.verify(job_storage(tmp_path), path)


@pytest.mark.parametrize("room", [True, False], ids=["memory", "storage"])
def test_a_wish_of_one_rank_ends_all_after_the_same_step_and_nothing_is_lost(
    pool: Pool, whole: tuple[Path, Said], tmp_path: Path, room: bool
) -> None:
    folder = str(tmp_path / "memory") if room else ""
    said = pool.run(8, runs.train_until, str(tmp_path), run_of(EIGHT), 3, 2, folder)
    paused = heard(said, Paused)
    assert sorted((one.rank, one.step) for one in paused) == [(rank, 3) for rank in range(8)]
    assert heard(said, Finished) == []
    saved = heard(said, ShardSaved)
    assert sorted(one.rank for one in saved) == ([] if room else list(range(8)))
    if room:
        kept, resume = (memory.assembled(Storage.open(folder), 3),), ()
    else:
        publisher = Publisher(job_storage(tmp_path), "run", 1, "test", run_of(EIGHT))
        kept, resume = (), (publisher.publish(3, sorted(saved, key=lambda one: one.rank)),)
    again = pool.run(8, runs.train, str(tmp_path), run_of(EIGHT), 2, resume, folder, kept)
    assert resumed(again).step == 3
    assert {**losses(said), **losses(again)} == losses(whole[1])


def test_a_run_that_is_suspended_is_in_storage_though_memory_has_room(
    pool: Pool, whole: tuple[Path, Said], tmp_path: Path
) -> None:
    folder = str(tmp_path / "memory")
    said = pool.run(8, runs.train_until, str(tmp_path), run_of(EIGHT), 3, 2, folder, "suspend")
    assert sorted((one.rank, one.step) for one in heard(said, Paused)) == [(rank, 3) for rank in range(8)]
    saved = sorted(heard(said, ShardSaved), key=lambda one: one.rank)
    assert [one.rank for one in saved] == list(range(8))
    resume = (Publisher(job_storage(tmp_path), "run", 1, "test", run_of(EIGHT)).publish(3, saved),)
    again = pool.run(8, runs.train, str(tmp_path), run_of(EIGHT), 2, resume)
    assert {**losses(said), **losses(again)} == losses(whole[1])


def test_a_wish_of_one_rank_saves_a_step_on_all_once_and_training_goes_on(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(2, runs.train_until, str(tmp_path), run_of({"dp": 2}), 3, 1, "", "save")
    assert sorted((one.rank, one.step) for one in heard(said, ShardSaved)) == [
        (rank, step) for rank in (0, 1) for step in (3, 4, 6)
    ]
    assert list(losses(said)) == [1, 2, 3, 4, 5, 6]
