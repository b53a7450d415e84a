"""Faults that broke other checkpoints, each a test: kills, damage, two publishers, a thousand saves."""

from __future__ import annotations

import dataclasses
import gc
import math
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import s3
from tests.pool import Pool
from tests.workers import cases, runs
from workers.checkpoint import logical, manifest, shards
from workers.checkpoint.manifest import Incomplete
from workers.checkpoint.publisher import Publisher
from workers.checkpoint.saver import Saver
from workers.checkpoint.shards import Piece, Region
from workers.checkpoint.storage import LocalStorage, Storage
from workers.reports import CheckpointRefused, Resumed, ShardSaved
from workers.spec import Assignment, RunSpec

pytestmark = pytest.mark.torch

SHAPE = (400, 256)  # of two shards of 200 kB
HEADER = {"samples": 0, "ledger": [], "optimizer": {"steps": 0}}


def value(step: int, attempt: int) -> np.ndarray:
    """The whole state of a step, another in each attempt."""
    return np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE) + 1000 * step + attempt / 8


def saved(storage: Storage, step: int, attempt: int, token: str) -> list[ShardSaved]:
    """Both ranks' shards of a step, in storage."""
    whole, half, reports = value(step, attempt), SHAPE[0] // 2, []
    for rank, first in enumerate((0, half)):
        region = Region("w", SHAPE, "float32", (0, 1), (first, 0), (half, SHAPE[1]))
        part = Piece(region, lambda first=first: whole[first : first + half].tobytes())
        record = shards.write(storage, manifest.folder(step, attempt, token), rank, [part])
        reports.append(ShardSaved(step, rank, record.index, record.digest, record.nbytes, HEADER, 0.0))
    return reports


def publisher(storage: Storage, attempt: int, token: str) -> Publisher:
    return Publisher(storage, "job", attempt, token, runs.spec(checkpoint={"keep": 2}))


def loaded(storage: Storage, path: str) -> np.ndarray:
    blank = {"w": torch.zeros(SHAPE)}
    logical.load(blank, manifest.load(storage, path), storage)
    return blank["w"].numpy()


# F14


class Torn(LocalStorage):
    """Is killed at call number `at` of those that write; of a write, half of the bytes have arrived by then."""

    def arm(self, at: int) -> Torn:
        self.left = at
        for name in ("link", "fsync", "mkdir", "unlink", "rmdir"):
            setattr(os, name, self._counted(getattr(os, name)))
        return self

    def write_stream(self, path: str) -> Any:
        return _Tearing(self, super().write_stream(path))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            if self.last():
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **named)

        return counted

    def last(self) -> bool:
        self.left -= 1
        return self.left == 0


class _Tearing:
    def __init__(self, storage: Torn, stream: Any) -> None:
        self.storage, self.stream = storage, stream

    def __enter__(self) -> _Tearing:
        self.out = self.stream.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self.stream.__exit__(*error)

    def write(self, data: Any) -> int:
        if self.storage.last():
            self.out.write(memoryview(data)[: len(data) // 2])
            self.out.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.out.write(data)


def saves(root: Path, attempt: int, first: int, at: int) -> None:
    """Three steps are saved, published and retained by a process that is killed at write number `at`; 0: never."""
    plain = Storage.open(str(root / "job"))
    storage = Torn(plain.fs, plain.root, plain.uri).arm(at)
    mine = publisher(storage, attempt, f"t{attempt}")
    with told(root, attempt).open("a", buffering=1) as out:
        for step in range(first, first + 3):
            print("began", step, file=out)
            mine.publish(step, saved(storage, step, attempt, f"t{attempt}"))
            print("published", step, file=out)
            mine.retain()
        print("writes", at - storage.left, file=out)


def told(root: Path, attempt: int) -> Path:
    return root / f"told-{attempt}"


def killed(root: Path, attempt: int, first: int, at: int) -> list[tuple[str, int]]:
    """What that process did: it said so before, or after."""
    process = multiprocessing.get_context("fork").Process(target=saves, args=(root, attempt, first, at))
    process.start()
    process.join(60)
    lines = [line.split() for line in told(root, attempt).read_text().splitlines()]
    assert process.exitcode == (0 if lines[-1][0] == "writes" else -signal.SIGKILL)
    return [(verb, int(number)) for verb, number in lines]


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """In the saves of one process that nobody kills."""
    *did, (verb, count) = killed(tmp_path_factory.mktemp("whole"), 1, 1, 0)
    assert did == [(verb, step) for step in (1, 2, 3) for verb in ("began", "published")]
    assert verb == "writes"
    return count


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_f14_a_kill_at_any_write_of_a_save(writes: int, data: st.DataObject) -> None:
    """Up to three processes, one after the other, each going on from the newest that was published."""
    with tempfile.TemporaryDirectory() as folder:
        root, newest, attempt = Path(folder), 0, 0
        storage = Storage.open(str(root / "job"))
        for at in data.draw(st.lists(st.integers(1, writes), min_size=1, max_size=3), label="killed at write"):
            attempt += 1
            did = killed(root, attempt, newest + 1, at)
            published = max([newest, *(step for verb, step in did if verb == "published")])
            paths = manifest.published(storage)
            newest = manifest.step_of(paths[0]) if paths else 0
            assert newest in (published, published + 1), did  # it may have been killed before it could say so
            for path in paths:
                document = manifest.verify(storage, path)
                expected = value(document.step, document.attempt)
                np.testing.assert_array_equal(loaded(storage, path), expected, strict=True)
        step, attempt = newest + 1, attempt + 1
        path = publisher(storage, attempt, "good").publish(step, saved(storage, step, attempt, "good"))
        assert manifest.published(storage)[0] == path
        np.testing.assert_array_equal(loaded(storage, path), value(step, attempt), strict=True)


# F15

RUN = {"layout": {"dp": 2}, "train": {"steps": 6, "horizon": 8}, "checkpoint": {"every_steps": 3}}


@dataclasses.dataclass(frozen=True)
class Two:
    """A run's storage with two checkpoints, of steps 3 and 6; and another attempt's, of both again."""

    root: Path
    newest: str
    older: str
    states: dict[str, dict[str, np.ndarray]]  # by manifest

    @property
    def storage(self) -> Storage:
        return Storage.open(str(self.root)).child("run")


@pytest.fixture(scope="module")
def two(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Two:
    root, run = tmp_path_factory.mktemp("two"), runs.spec(**RUN)
    paths = {}
    for attempt in (1, 2):  # the second is of other numbers
        results = pool.run(2, runs.train, str(root), run, 3 - attempt, ())
        run = runs.spec(**{**RUN, "train": RUN["train"] | {"learning_rate": 3e-3}})
        reports = [one for said in results for one in said if isinstance(one, ShardSaved)]
        for step in (3, 6):
            storage = Storage.open(str(root)).child("run")
            mine = [report for report in reports if report.step == step]
            paths[step, 3 - attempt] = Publisher(storage, "run", 3 - attempt, "test", run).publish(step, mine)
    states = {path: whole(Storage.open(str(root)).child("run"), path) for path in paths.values()}
    return Two(root, paths[6, 2], paths[3, 2], states)


def whole(storage: Storage, path: str) -> dict[str, np.ndarray]:
    document = manifest.load(storage, path)
    tensors = {name: torch.zeros(one.shape, dtype=torch.float64) for name, one in document.tensors.items()}
    logical.load(tensors, document, storage)
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def flipped(storage: Storage, path: str, place: int) -> str:
    """A bit of a file, counted round and round."""
    file = Path(storage.root, path)
    data = bytearray(file.read_bytes())
    place %= 8 * len(data)
    data[place // 8] ^= 1 << place % 8
    file.write_bytes(data)
    return path


def cut_short(storage: Storage, path: str, place: int) -> str:
    file = Path(storage.root, path)
    size = file.stat().st_size
    os.truncate(file, place % size)
    return path


def of_another_attempt(storage: Storage, path: str, place: int) -> str:
    return put(storage, path, path.replace("/2-test/", "/1-test/"))


def of_another_step(storage: Storage, path: str, place: int) -> str:
    return put(storage, path, path.replace("0000000006", "0000000003"))


def of_another_rank(storage: Storage, path: str, place: int) -> str:
    mine, other = ("rank-00000", "rank-00001")[:: 1 if "rank-00000" in path else -1]
    return put(storage, path, path.replace(mine, other))


def put(storage: Storage, path: str, other: str) -> str:
    assert other != path
    shutil.copy(Path(storage.root, other), Path(storage.root, path))
    return path


EXCHANGES = [of_another_attempt, of_another_step, of_another_rank]


def files(storage: Storage, path: str) -> list[str]:
    """The manifest, the shards and their indexes."""
    document = manifest.load(storage, path)
    return [path, *(file for shard in document.shards for file in (shard.path, shard.index))]


def continued(store: dist.Store, rank: int, root: str, run: RunSpec, resume: tuple[str, ...]) -> Any:
    """What the trainer goes on from: what is said of it, and the state."""
    with cases.going_on(store, rank, root, run, resume) as (engine, _, _, said):
        return said, runs.kept(engine.state())


@settings(max_examples=25, deadline=None)
@example(damage=flipped, file=0, place=99)
@example(damage=flipped, file=1, place=0)
@example(damage=flipped, file=2, place=999)
@example(damage=cut_short, file=3, place=2**40 - 1)
@example(damage=of_another_attempt, file=1, place=0)
@example(damage=of_another_attempt, file=4, place=0)
@example(damage=of_another_step, file=1, place=0)
@example(damage=of_another_rank, file=3, place=0)
@given(damage=st.sampled_from([flipped, cut_short, *EXCHANGES]), file=st.integers(0, 4), place=st.integers(0, 2**40))
def test_f15_damage_is_found_named_and_walked_back_from(
    pool: Pool, two: Two, damage: Callable[[Storage, str, int], str], file: int, place: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = shutil.copytree(two.root, Path(folder) / "copy")
        storage = Storage.open(str(root)).child("run")
        path = files(storage, two.newest)[max(file, damage in EXCHANGES)]  # of the manifest there is one only
        damage(storage, path, place)
        ((said, state),) = pool.run(1, continued, str(root), runs.spec(**RUN | {"layout": {}}), (two.newest, two.older))
        assert [type(report) for report in said] == [CheckpointRefused, Resumed], "nothing was found"
        refused, resumed = said
        assert refused.manifest == two.newest
        assert path in f"{refused.manifest} {refused.reason}"
        assert resumed == Resumed(3, two.older)
        tensors = runs.merged([{"tensors": state}])
        assert tensors.keys() == two.states[two.older].keys()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, two.states[two.older][name], err_msg=name)


# F16


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3.served("seaweed") as (uri, _):
        yield uri


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.server)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "local":
        yield Storage.open(str(tmp_path)).child("job")
        return
    yield Storage.open(request.getfixturevalue("bucket")).child(uuid.uuid4().hex)


@pytest.mark.parametrize("first", [0, 1])
def test_f16_of_two_publishers_in_one_attempt_one_wins(place: Storage, first: int) -> None:
    """Two controllers that both hold themselves for the one: each with shards of its own, or with the same ones."""
    both = [(publisher(place, 1, token), saved(place, 5, 1, token)) for token in ("a", "b")][:: 1 if first == 0 else -1]
    (winner, shards_of_winner), (loser, shards_of_loser) = both
    path = winner.publish(5, shards_of_winner)
    with pytest.raises(FileExistsError):
        loser.publish(5, shards_of_loser)
    with pytest.raises(FileExistsError):  # made at another moment, so it is another one
        publisher(place, 1, winner.token).publish(5, shards_of_winner)
    assert manifest.published(place) == [path]
    assert manifest.verify(place, path).token == winner.token
    np.testing.assert_array_equal(loaded(place, path), value(5, 1), strict=True)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_f16_an_older_attempt_that_publishes_late_is_never_the_newest(place: Storage, order: tuple[int, int]) -> None:
    reports = {attempt: saved(place, 5, attempt, f"t{attempt}") for attempt in order}
    paths = {attempt: publisher(place, attempt, f"t{attempt}").publish(5, reports[attempt]) for attempt in order}
    assert manifest.published(place) == [paths[2], paths[1]]
    for attempt, path in paths.items():
        manifest.verify(place, path)
        np.testing.assert_array_equal(loaded(place, path), value(5, attempt), strict=True)
    with pytest.raises(Incomplete, match="is not in"):  # nor can it publish the other's shards as its own
        publisher(place, 1, "t1").publish(5, reports[2])


def test_f16_at_the_same_moment(place: Storage) -> None:
    storage, count = place, 6
    for step in range(1, 21):
        each = [(publisher(storage, 1, f"t{n}"), saved(storage, step, 1, f"t{n}")) for n in range(count)]
        meeting, ended = threading.Barrier(count), []

        def publish(mine: Publisher, reports: list[ShardSaved], step: int = step, meeting: Any = meeting) -> str:
            meeting.wait(30)
            try:
                mine.publish(step, reports)
            except FileExistsError:
                return ""
            return mine.token

        with ThreadPoolExecutor(count) as threads:
            ended = [token for token in threads.map(lambda one: publish(*one), each) if token]
        assert len(ended) == 1
        newest = manifest.verify(storage, manifest.published(storage)[0])
        assert (newest.step, newest.token) == (step, ended[0])


# F21


def thousand(store: dist.Store, rank: int, root: str) -> list[int]:
    """Bytes that this process holds after each hundred saves, which are all published and retained."""
    run = runs.spec(checkpoint={"keep": 2})
    assignment = Assignment(job="run", attempt=1, token="test", rank=0, run=run, root=root, store_host="", store_port=0)
    storage, said, held = Storage.open(root).child("run"), [], []
    mine, saver = Publisher(storage, "run", 1, "test", run), Saver(storage, assignment, said.append)
    state = {f"w{number}": torch.randn(64, 64) for number in range(8)}
    for step in range(1, 1001):
        saver.save(step, state, {}, {"samples": step})
        saver.wait()
        mine.publish(step, [said.pop()])
        mine.retain()
        if step % 100 == 0:
            gc.collect()
            held.append(psutil.Process().memory_info().rss)
    saver.close()
    assert len(manifest.published(storage)) == 2
    return held


def test_f21_a_thousand_saves_hold_no_memory(pool: Pool) -> None:
    """Where files are in memory, if there is such a place: thousands of syncs to a disk would be what takes long."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:
        (held,) = pool.run(1, thousand, root)
    assert len(held) == 10
    assert max(held[1:]) - held[0] <= 16 << 20
