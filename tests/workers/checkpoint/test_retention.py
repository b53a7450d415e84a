"""Which checkpoints stay: the decision by itself, and done on every kind of storage."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import s3
from workers.checkpoint import manifest
from workers.checkpoint.publisher import Publisher
from workers.checkpoint.retention import (
    ABANDONED_S,
    LEAST,
    SWEEP_S,
    Known,
    Policy,
    Retention,
    held,
    hold,
    kept,
    quick_check,
)
from workers.checkpoint.storage import UNFINISHED, LocalStorage, Storage
from workers.models.spec import ModelSpec
from workers.spec import CheckpointSpec, ParallelLayout, RunSpec, TrainSpec

DAY = ABANDONED_S


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3.served("seaweed") as (uri, _):
        yield uri


def opened(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    folder = uuid.uuid4().hex
    if kind == "s3":
        return Storage.open(f"{request.getfixturevalue('bucket')}/{folder}")
    return Storage.open(str(tmp_path / "job") if kind == "local" else f"memory://{folder}")


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.server)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return opened(request.param, request, tmp_path)


@pytest.fixture(params=["local", "memory"])
def quick(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Those for long tables."""
    return opened(request.param, request, tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> Storage:
    return Storage.open(str(tmp_path / "job"))


def publish(storage, checkpoint, *keys):
    for step, attempt in keys:
        manifest.publish(storage, checkpoint(storage, step, attempt, rows=1))


def paths(keys):
    return [manifest.path(*key) for key in keys]


def published(storage):
    return {manifest.key_of(path) for path in manifest.published(storage)}


def folders(storage):
    """(step, attempt, token) of those that hold a file."""
    found = {manifest.folder_of(name) for name in storage.names(manifest.FOLDERS)}
    return {(int(it.split("/")[1]), *_attempt(it)) for it in found}


def _attempt(folder):
    attempt, token = folder.rpartition("/")[2].split("-")
    return int(attempt), token


# The decision.

DECISIONS = {
    # steps (good), steps (no good), keep, keep_every, held -> steps that stay
    "the newest": ([1, 2, 3, 4], [], 3, None, [], [2, 3, 4]),
    "fewer than asked": ([1, 2], [], 3, None, [], [1, 2]),
    "one means two": ([1, 2, 3], [], 1, None, [], [2, 3]),
    "multiples for ever": ([10, 20, 25, 30, 40, 45, 50], [], 2, 20, [], [20, 40, 45, 50]),
    "a multiple that is no good": ([10, 25, 30], [20], 2, 20, [], [25, 30]),
    "held": ([1, 2, 3, 4], [], 2, None, [1], [1, 3, 4]),
    "held and no good": ([2, 3, 4], [1], 2, None, [1], [1, 3, 4]),
    "what is no good isn't counted": ([1, 2], [3, 4], 2, None, [], [1, 2, 3, 4]),
    "and goes when it is older than all that are counted": ([2, 4, 5], [1, 3], 2, None, [], [4, 5]),
    "and stays in between": ([2, 4], [3], 2, None, [], [2, 3, 4]),
    "none is good": ([], [1, 2, 3], 1, None, [], [1, 2, 3]),
    "one is good": ([2], [1, 3], 5, None, [], [2, 3]),
    "nothing": ([], [], 2, 10, [], []),
}  # fmt: skip


@pytest.mark.parametrize("case", DECISIONS)
def test_decision(case):
    good, bad, keep, keep_every, holds, stays = DECISIONS[case]
    known = [Known(manifest.path(step, 1), step, 1, step in good) for step in [*good, *bad]]
    decision = kept(known, Policy(keep, keep_every), paths((step, 1) for step in holds))
    assert list(decision.kept) == paths((step, 1) for step in sorted(stays, reverse=True))
    assert set(decision.gone) == {one.path for one in known} - set(decision.kept)
    assert all({**decision.kept, **decision.gone}.values())


def test_the_best_evaluation_stays():
    known = [Known(manifest.path(step, 1), step, 1, good=step != 30) for step in (10, 20, 30, 40, 50)]
    decision = kept(known, Policy(2), best=20)
    assert decision.kept[manifest.path(20, 1)] == "step 20 has the best evaluation"
    assert list(kept(known, Policy(2), best=30).gone) == [manifest.path(step, 1) for step in (30, 20, 10)]


def test_of_one_step_the_newer_attempt_is_newer():
    known = [Known(manifest.path(5, attempt), 5, attempt, True) for attempt in (2, 11, 1)]
    assert list(kept(known, Policy(2)).gone) == [manifest.path(5, 1)]


def test_a_decision_says_why():
    known = [Known(manifest.path(step, 1), step, 1, step != 10) for step in (10, 20, 30, 40, 50)]
    decision = kept(known, Policy(2, 20), {manifest.path(30, 1)})
    assert [*decision.kept.values()] == [
        "number 1 of the newest 2 good ones",
        "number 2 of the newest 2 good ones",
        "held by a reader",
        "step 20 is a multiple of 20",
    ]
    assert [*decision.gone.values()] == ["no good and older than the newest 2 good ones"]


@settings(deadline=None)
@given(
    keys=st.dictionaries(st.tuples(st.integers(0, 30), st.integers(1, 3)), st.booleans(), max_size=20),
    keep=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 10),
    choose=st.randoms(use_true_random=False),
)
def test_what_must_stay_stays(keys, keep, keep_every, choose):
    known = [Known(manifest.path(*key), *key, good) for key, good in keys.items()]
    holds = {one.path for one in known if choose.random() < 0.2}
    decision = kept(known, Policy(keep, keep_every), holds)
    assert decision.kept.keys() | decision.gone.keys() == {one.path for one in known}
    assert not (decision.kept.keys() | holds) & decision.gone.keys()
    good = sorted((one.step, one.attempt) for one in known if one.good)
    newest = good[-max(keep, LEAST) :]
    assert {manifest.path(*key) for key in newest} <= decision.kept.keys()
    for one in known:
        if one.path in decision.gone:
            assert newest
            assert (one.step, one.attempt) < newest[0]
            assert not (one.good and keep_every and one.step % keep_every == 0)


@pytest.mark.parametrize(("keep", "keep_every", "why"), [(0, None, "keep 0 .* at least 1"), (2, 0, "keep_every 0")])
def test_a_policy_that_keeps_none_is_refused(keep, keep_every, why):
    with pytest.raises(ValueError, match=why):
        Policy(keep, keep_every)


# Done.

RETENTION = {
    # published, unpublished, keep, protected, rejected -> what stays, (step, attempt)
    "the newest two": ([(1, 1), (2, 1), (3, 1)], [], 2, [], [], [(2, 1), (3, 1)]),
    "fewer than asked": ([(1, 1)], [], 2, [], [], [(1, 1)]),
    "unpublished ones don't count":
        ([(1, 1), (2, 1)], [(3, 1), (4, 1)], 2, [], [], [(1, 1), (2, 1), (3, 1), (4, 1)]),
    "nothing is published": ([], [(1, 1), (2, 1)], 1, [], [], [(1, 1), (2, 1)]),
    "failed saves of the past go": ([(2, 1), (3, 1)], [(1, 1)], 2, [], [], [(2, 1), (3, 1)]),
    "failed saves in between stay": ([(1, 1), (3, 1)], [(2, 1)], 2, [], [], [(1, 1), (2, 1), (3, 1)]),
    "the one in flight stays": ([(1, 1), (2, 1), (3, 1)], [(4, 1)], 1, [], [], [(2, 1), (3, 1), (4, 1)]),
    "in flight at an older step": ([(5, 1)], [(4, 2)], 1, [], [], [(5, 1), (4, 2)]),
    "in flight after a rollback": ([(5, 1), (6, 1)], [(4, 1, "t1+1")], 1, [], [], [(5, 1), (6, 1), (4, 1, "t1+1")]),
    "failed before a rollback":
        ([(5, 1, "t1+1"), (6, 1, "t1+1")], [(4, 1)], 1, [], [], [(5, 1, "t1+1"), (6, 1, "t1+1")]),
    "left by an older attempt": ([(5, 2)], [(4, 1)], 1, [], [], [(5, 2)]),
    "protected stays": ([(1, 1), (2, 1), (3, 1), (4, 1)], [], 2, [(1, 1)], [], [(1, 1), (3, 1), (4, 1)]),
    "rejected ones don't count": ([(1, 1), (2, 1), (3, 1)], [], 2, [], [(3, 1)], [(1, 1), (2, 1), (3, 1)]),
    "old rejected ones go": ([(1, 1), (2, 1), (3, 1)], [], 2, [], [(1, 1)], [(2, 1), (3, 1)]),
    "all are rejected": ([(1, 1), (2, 1)], [(0, 1)], 1, [], [(1, 1), (2, 1)], [(0, 1), (1, 1), (2, 1)]),
    "attempts at one step": ([(2, 1), (2, 2), (2, 11)], [], 1, [], [], [(2, 2), (2, 11)]),
}  # fmt: skip


@pytest.mark.parametrize("case", RETENTION)
def test_retention(quick, checkpoint, case):
    there, unpublished, keep, protect, rejected, stays = (
        [*it] if isinstance(it, list) else it for it in RETENTION[case]
    )

    def whole(keys):
        return {(step, attempt, *(token or [f"t{attempt}"])) for step, attempt, *token in keys}

    made = {key: checkpoint(quick, *key, rows=1) for key in [*whole(there), *whole(unpublished)]}
    for key in whole(there):
        manifest.publish(quick, made[key])
    retention = Retention(quick, Policy(keep))
    removed = retention.apply(paths(rejected), paths(protect))
    assert folders(quick) == whole(stays)
    assert published(quick) == {key[:2] for key in whole(stays) & whole(there)}
    gone = made.keys() - whole(stays)
    assert set(removed) == {manifest.folder(*key) for key in gone} | {
        manifest.path(*key[:2]) for key in gone & whole(there)
    }
    assert retention.apply(paths(rejected), paths(protect)) == []


def cut(storage, made):
    data = storage.read(made.shards[1].path)
    storage.delete(made.shards[1].path)
    storage.create(made.shards[1].path, data[:-1])


def without(field):
    return lambda storage, made: storage.delete(getattr(made.shards[1], field))


def scribbled(storage, made):
    data = storage.read(made.path)
    storage.delete(made.path)
    storage.create(made.path, data.replace(b'"samples"', b'"sampled"'))


DAMAGE = {
    "a shard cut short": (cut, "rank-00001.bin has 1023 bytes instead of 1024"),
    "a shard away": (without("path"), "rank-00001.bin is missing"),
    "an index away": (without("index"), "rank-00001.json is missing"),
    "a manifest changed": (scribbled, "fails its digest"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_not_whole_is_not_counted(storage, checkpoint, case):
    damage, why = DAMAGE[case]
    made = {step: checkpoint(storage, step, rows=1) for step in (1, 2, 3, 4, 5)}
    for document in made.values():
        manifest.publish(storage, document)
    for step in (1, 4):
        damage(storage, made[step])
    assert why in quick_check(storage, made[4].path)
    assert quick_check(storage, made[5].path) == ""
    Retention(storage, Policy(2)).apply()
    assert published(storage) == {(3, 1), (4, 1), (5, 1)}
    assert {step for step, _, _ in folders(storage)} == {3, 4, 5}
    assert quick_check(storage, made[1].path) == "missing"


def test_multiples_stay_for_ever(storage, checkpoint):
    retention = Retention(storage, Policy(2, keep_every=4))
    for step in range(1, 12):
        publish(storage, checkpoint, (step, 1))
        retention.apply()
    assert published(storage) == {(4, 1), (8, 1), (10, 1), (11, 1)}
    assert {step for step, _, _ in folders(storage)} == {4, 8, 10, 11}


def test_abandoned_shards_go(storage, checkpoint):
    publish(storage, checkpoint, (5, 2))
    for step in (7, 8):
        checkpoint(storage, step, 1, rows=1)
    checkpoint(storage, 6, 3, rows=1)
    clock = Clock()
    assert Retention(storage, Policy(2), clock=clock).apply() == []
    clock.ahead = DAY + 60
    Retention(storage, Policy(2), clock=clock).apply()
    assert {step for step, _, _ in folders(storage)} == {5, 6}


def test_a_failed_save_between_multiples_goes(storage, checkpoint):
    publish(storage, checkpoint, (4, 1), (8, 1), (9, 1))
    checkpoint(storage, 5, rows=1)
    Retention(storage, Policy(2, keep_every=4)).apply()
    assert {step for step, _, _ in folders(storage)} == {4, 8, 9}


def test_what_is_held_stays_until_it_is_let_go(storage, checkpoint):
    publish(storage, checkpoint, *[(step, 1) for step in (1, 2, 3, 4)])
    retention = Retention(storage, Policy(2))
    with hold(storage, manifest.path(1, 1), 60.0), hold(storage, manifest.path(1, 1), 60.0):
        assert held(storage, time.time()) == {manifest.path(1, 1)}
        retention.apply()
        assert published(storage) == {(1, 1), (3, 1), (4, 1)}
        assert {step for step, _, _ in folders(storage)} == {1, 3, 4}
    assert storage.names("holds") == []
    retention.apply()
    assert published(storage) == {(3, 1), (4, 1)}


def test_a_hold_ends_at_its_time_where_its_reader_died(storage, checkpoint):
    publish(storage, checkpoint, *[(step, 1) for step in (1, 2, 3)])
    now = time.time()
    entered = hold(storage, manifest.path(1, 1), 60.0)
    entered.__enter__()  # and never ends
    assert held(storage, now + 30) == {manifest.path(1, 1)}
    assert len(storage.names("holds")) == 1
    assert held(storage, now + 90) == set()
    assert storage.names("holds") == []
    entered.__exit__(None, None, None)  # what is gone is as good as let go


def test_only_manifests_are_held(storage):
    with pytest.raises(ValueError, match="is not a manifest's path"), hold(storage, "manifests/notes.txt", 60.0):
        pass
    assert storage.names() == []


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"until": "soon"}', b"\xff"])
def test_a_hold_that_can_not_be_read_is_none(local, data):
    local.create(f"holds/0000000001-000001.{uuid.uuid4().hex}.json", data)
    local.create("holds/notes.txt", b"not a hold")
    assert held(local, 0.0) == set()
    assert local.names("holds") == ["holds/notes.txt"]


class Late(LocalStorage):
    """A reader takes its hold and has read the manifest in the moment before that is removed."""

    reader = None

    def delete(self, prefix):
        super().delete(prefix)
        if prefix == manifest.path(1, 1):
            self.reader = hold(self, prefix, 60.0)
            self.reader.__enter__()


def test_a_hold_that_comes_late_saves_the_shards(local, checkpoint):
    late = Late(local.fs, local.root, local.uri)
    publish(late, checkpoint, *[(step, 1) for step in (1, 2, 3)])
    retention = Retention(late, Policy(2))
    assert retention.apply() == [manifest.path(1, 1)]
    assert {step for step, _, _ in folders(late)} == {1, 2, 3}
    late.reader.__exit__(None, None, None)
    assert retention.apply() == [manifest.folder(1, 1, "t1")]


@dataclasses.dataclass
class Clock:
    """Ahead of the stores' own clocks, which give the times of files."""

    ahead: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


ABANDONED = {
    # published, unpublished (step, attempt, token) -> what stays of the unpublished after a day
    "of an older attempt, at a newer step": ([(5, 2)], [(7, 1, "a"), (6, 2, "b")], [(6, 2, "b")]),
    "of this attempt, before its newest": ([(5, 1)], [(6, 1, "a"), (7, 1, "a")], [(7, 1, "a")]),
    "before a rollback": ([(5, 1)], [(9, 1, "a"), (6, 1, "a+1")], [(6, 1, "a+1")]),
    "of another token": ([(5, 1), (6, 2)], [(6, 1, "a"), (5, 1, "b")], []),
    "nothing was ever published": ([], [(1, 1, "a"), (2, 2, "b")], [(1, 1, "a"), (2, 2, "b")]),
}


def laid_out(storage, checkpoint, case):
    there, unpublished, stays = ABANDONED[case]
    publish(storage, checkpoint, *there)
    for key in unpublished:
        checkpoint(storage, *key, rows=1)
    return there, unpublished, stays


@pytest.mark.parametrize("case", ABANDONED)
def test_shards_of_no_manifest_go_after_a_day(quick, checkpoint, case):
    there, _, stays = laid_out(quick, checkpoint, case)
    clock, mine = Clock(), {(*key, f"t{key[1]}") for key in there}
    retention = Retention(quick, Policy(2), clock=clock)
    assert retention.apply() == []
    clock.ahead = DAY - 60
    assert retention.apply() == []
    clock.ahead = DAY + SWEEP_S + 60
    retention.apply()
    assert folders(quick) == mine | set(stays)
    assert published(quick) == set(there)


@pytest.mark.parametrize("case", ABANDONED)
def test_when_the_job_is_over_shards_of_no_manifest_go(quick, checkpoint, case):
    there, unpublished, _ = laid_out(quick, checkpoint, case)
    assert len(Retention(quick, Policy(2)).finish()) == len(unpublished)
    assert folders(quick) == {(*key, f"t{key[1]}") for key in there}
    assert published(quick) == set(there)


def test_a_checkpoint_that_can_not_be_read_keeps_its_shards_when_the_job_is_over(local, checkpoint):
    publish(local, checkpoint, (5, 1), (6, 1))
    Path(local.root, manifest.path(6, 1)).write_bytes(b"torn")
    assert Retention(local, Policy(2)).finish() == []


def test_a_folder_that_is_still_written_to_is_not_abandoned(local, checkpoint):
    publish(local, checkpoint, (5, 2))
    for step in (7, 8):
        checkpoint(local, step, 1, rows=1)
    long_ago = time.time() - DAY - 60
    files = [Path(local.root, name) for name in local.names(manifest.FOLDERS)]
    for file in files:
        if not ("0000000008" in str(file) and file.name == "rank-00001.json"):
            os.utime(file, (long_ago, long_ago))
    Retention(local, Policy(2)).apply()
    assert {step for step, _, _ in folders(local)} == {5, 8}


def test_half_written_files_go_after_a_day(local, checkpoint):
    publish(local, checkpoint, (5, 1))
    torn = [Path(local.root, "checkpoints", f".rank.{n}{UNFINISHED}") for n in range(2)]
    for file in torn:
        file.write_bytes(b"half")
    os.utime(torn[0], (0, 0))
    assert Retention(local, Policy(2)).apply() == [f"checkpoints/{torn[0].name}"]
    assert [file.exists() for file in torn] == [False, True]


class Counted(LocalStorage):
    """Remembers which manifests were read, and counts sweeps."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.read_manifests, self.sweeps = [], 0

    def read(self, path, start=None, end=None):
        if path.startswith("manifests/"):
            self.read_manifests.append(manifest.key_of(path)[0])
        return super().read(path, start, end)

    def sweep(self, prefix, older_than_s):
        self.sweeps += 1
        return super().sweep(prefix, older_than_s)


def test_what_was_looked_at_is_remembered(local, checkpoint):
    counted, clock = Counted(local.fs, local.root, local.uri), Clock()
    retention = Retention(counted, Policy(3), clock=clock)
    publish(counted, checkpoint, (1, 1), (2, 1))
    counted.create("manifests/0000000003-000001.json", b"{}")
    for _ in range(2):
        retention.apply()
    assert sorted(counted.read_manifests) == [1, 2, 3, 3]  # again only what was no good
    publish(counted, checkpoint, (4, 1))
    counted.read_manifests.clear()
    retention.apply()
    assert sorted(counted.read_manifests) == [3, 4]
    assert counted.sweeps == 1
    clock.ahead = SWEEP_S + 1
    retention.apply()
    assert counted.sweeps == 2


def test_storage_that_is_away_removes_nothing(local, checkpoint):
    class Away(LocalStorage):
        def sizes(self, prefix=""):
            raise TimeoutError("away")

    publish(local, checkpoint, *[(step, 1) for step in (1, 2, 3)])
    with pytest.raises(TimeoutError):
        Retention(Away(local.fs, local.root, local.uri), Policy(2)).apply()
    assert published(local) == {(1, 1), (2, 1), (3, 1)}


def test_a_publisher_keeps_what_its_run_asks_for(local, checkpoint):
    publish(local, checkpoint, *[(step, 1) for step in (1, 2, 3, 4, 5, 6)])
    model = ModelSpec(family="llama", layers=1, hidden=8, heads=1, kv_heads=1, ffn_hidden=8, seq_len=8)
    run = RunSpec(
        model=model,
        train=TrainSpec(steps=1, global_batch=1),
        parallel=ParallelLayout(),
        checkpoint=CheckpointSpec(keep=2, keep_every=3),
        data={"source": "builtin:topics"},
    )
    publisher = Publisher(local, "job-1", 1, "t1", run)
    publisher.retain(rejected=paths([(6, 1)]), protect=paths([(1, 1)]))
    assert published(local) == {(1, 1), (3, 1), (4, 1), (5, 1), (6, 1)}


# A kill at any write.


class Killed(BaseException):
    """The process is gone."""


class Mortal(LocalStorage):
    """Dies at the given write or removal: before it, or half-way through a stream."""

    def arm(self, at: int) -> Mortal:
        self.left = at
        return self

    def _live(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed

    def create(self, path, data):
        self._live()
        super().create(path, data)

    def delete(self, prefix):
        self._live()
        super().delete(prefix)

    def write_stream(self, path):
        stream = super().write_stream(path)
        mortal = self

        class Stream:
            def __enter__(self):
                self.out = stream.__enter__()
                return self

            def write(self, data):
                mortal._live()
                return self.out.write(data)

            def flush(self):
                self.out.flush()

            def __exit__(self, *error):
                return stream.__exit__(*error)

        return Stream()


def test_f14_a_kill_at_any_write_leaves_the_newest_published_checkpoint_good(tmp_path, checkpoint):
    """Four steps are saved, published and retained; a kill at any write leaves what was published good."""
    newest_seen = set()
    for at in itertools.count(1):
        storage = Storage.open(str(tmp_path / str(at)))
        mortal = Mortal(storage.fs, storage.root, storage.uri).arm(at)
        retention = Retention(mortal, Policy(1))
        done = []
        try:
            for step in (1, 2, 3, 4):
                manifest.publish(mortal, checkpoint(mortal, step, rows=300))
                done.append(step)
                retention.apply()
            killed = False
        except Killed:
            killed = True
        found = manifest.published(storage)
        assert len(found) >= min(2, len(done)), f"killed at write {at}: {found} is left of steps {done}"
        for path in found:
            manifest.verify(storage, path)
        if found:
            newest = manifest.load(storage, found[0])
            assert newest.step in (done[-1:] or [0])
            newest_seen.add(newest.step)
        for step in (5, 6):
            manifest.publish(storage, checkpoint(storage, step, 2, rows=1))
        Retention(storage, Policy(1)).apply()
        assert {step for step, _, _ in folders(storage)} == {5, 6}
        if not killed:
            break
    assert newest_seen == {1, 2, 3, 4}
    assert at > 30


def test_holds_are_plain_json(local):
    with hold(local, manifest.path(300, 2), 60.0):
        (name,) = local.names("holds")
        assert name.startswith("holds/0000000300-000002.")
        assert json.loads(local.read(name))["until"] == pytest.approx(time.time() + 60.0, abs=5.0)
