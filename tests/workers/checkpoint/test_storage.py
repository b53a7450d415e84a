"""The same promises on every kind of storage."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import s3
from workers.checkpoint.retry import may_pass
from workers.checkpoint.storage import UNFINISHED, LocalStorage, Storage


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3.served("seaweed") as (uri, _):
        yield uri


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.server)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    folder = uuid.uuid4().hex
    if request.param == "s3":
        return Storage.open(f"{request.getfixturevalue('bucket')}/{folder}")
    return Storage.open(str(tmp_path) if request.param == "local" else f"memory://{folder}")


def write(storage: Storage, path: str, data: bytes) -> None:
    with storage.write_stream(path) as out:
        out.write(data)


@pytest.mark.parametrize("first", [Storage.create, write])
@pytest.mark.parametrize("second", [Storage.create, write])
def test_what_is_there_is_never_overwritten(storage, first, second):
    def put(function, data):
        storage.create("a/b", data) if function is Storage.create else function(storage, "a/b", data)

    put(first, b"one")
    with pytest.raises(FileExistsError):
        put(second, b"two")
    assert storage.read("a/b") == b"one"
    assert storage.names() == ["a/b"]


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000, bytes(range(256)) * 140_000], ids=len)
def test_a_stream_holds_what_was_written(storage, data):
    write(storage, "stream", data)
    assert storage.read("stream") == data
    assert storage.size("stream") == len(data)


def test_a_stream_that_fails_leaves_nothing(storage):
    def fail():
        with storage.write_stream("a/b") as out:
            out.write(b"half")
            assert storage.names() == []
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail()
    assert storage.names() == []
    assert not storage.exists("a/b")
    write(storage, "a/b", b"whole")
    assert storage.read("a/b") == b"whole"


@pytest.mark.parametrize("storage", ["local", pytest.param("s3", marks=pytest.mark.server)], indirect=True)
def test_of_many_creators_one_wins(storage):
    """fsspec's memory looks first and then writes, so it is not asked."""
    outcomes: list[bytes] = []

    def race(data: bytes) -> None:
        try:
            storage.create("one", data)
        except FileExistsError:
            return
        outcomes.append(data)

    threads = [threading.Thread(target=race, args=(bytes([n]) * 1000,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 1
    assert storage.read("one") == outcomes[0]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (None, None, b"0123456789"), (3, 7, b"3456"), (8, None, b"89"), (None, 2, b"01"),
        (4, 4, b""), (8, 20, b"89"), (10, 20, b""), (15, 20, b""),
    ],
)  # fmt: skip
def test_ranges(storage, start, end, expected):
    storage.create("digits", b"0123456789")
    assert storage.read("digits", start, end) == expected


def test_names_are_relative_to_the_root(storage):
    for path in ("a/1", "a/b/2", "ab/3"):
        storage.create(path, b"x")
    assert storage.names() == ["a/1", "a/b/2", "ab/3"]
    assert storage.names("a") == ["a/1", "a/b/2"]
    assert storage.child("a").names() == ["1", "b/2"]
    assert storage.child("a").read("b/2") == b"x"
    assert storage.names("missing") == []


def test_listings_tell_sizes_and_times(storage):
    began = time.time()
    for path, nbytes in {"a/1": 0, "a/b/2": 7, "ab/3": 1}.items():
        storage.create(path, bytes(nbytes))
    assert storage.sizes() == {"a/1": 0, "a/b/2": 7, "ab/3": 1}
    assert storage.sizes("a") == {"a/1": 0, "a/b/2": 7}
    assert storage.sizes("a/b/2") == {"a/b/2": 7}
    assert storage.sizes("missing") == {}
    assert storage.child("a").sizes("b") == {"b/2": 7}
    assert all(began - 5 <= found.modified <= time.time() + 5 for found in storage.objects().values())


def test_what_is_whole_is_never_swept(storage):
    storage.create("a/1", b"x")
    assert storage.abandoned("", -3600.0) == []
    assert storage.sweep("", -3600.0) == []
    assert storage.sweep("missing", -3600.0) == []
    assert storage.names() == ["a/1"]


def test_delete_takes_a_folder_or_a_file_and_may_be_repeated(storage):
    for path in ("a/1", "a/b/2", "ab/3"):
        storage.create(path, b"x")
    for _ in range(2):
        storage.delete("a")
    assert storage.names() == ["ab/3"]
    storage.delete("ab/3")
    assert storage.names() == []


@pytest.mark.parametrize("call", [Storage.read, Storage.size])
def test_missing(storage, call):
    with pytest.raises(FileNotFoundError):
        getattr(storage, call.__name__)("nothing")
    assert not storage.exists("nothing")


@pytest.mark.parametrize("path", ["../up", "a/../../up", "/etc/passwd"])
def test_a_path_stays_inside(storage, path):
    with pytest.raises(ValueError, match="not a path inside"):
        storage.read(path)


def test_another_handle_sees_a_new_object_at_once(storage):
    other = Storage.open(storage.uri)
    assert other.names("a") == []
    storage.create("a/1", b"x")
    assert other.names("a") == ["a/1"]
    assert other.exists("a/1")


def test_what_a_killed_process_left_is_no_object(tmp_path):
    storage = Storage.open(str(tmp_path))
    assert isinstance(storage, LocalStorage)
    (tmp_path / f".manifest.json.0123{UNFINISHED}").write_bytes(b"half")
    assert storage.names() == []
    storage.create("manifest.json", b"whole")
    assert storage.names() == ["manifest.json"]


def test_what_killed_processes_left_is_swept_when_it_is_old(tmp_path):
    storage = Storage.open(str(tmp_path / "job"))
    ages = {"a/.1.0": 90, "a/b/.2.0": 200, "a/.1.1": 30, "ab/.3.0": 90, ".4.0": 90}
    for path, age in ages.items():
        file = tmp_path / "job" / f"{path}{UNFINISHED}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"half")
        os.utime(file, (time.time() - age, time.time() - age))
    storage.create("a/1", b"whole")
    os.utime(tmp_path / "job/a/1", (0, 0))
    assert storage.abandoned("a", 60.0) == [f"a/.1.0{UNFINISHED}", f"a/b/.2.0{UNFINISHED}"]
    assert storage.sweep("a", 60.0) == [f"a/.1.0{UNFINISHED}", f"a/b/.2.0{UNFINISHED}"]
    assert storage.sweep("a", 60.0) == []
    assert storage.abandoned("", 0.0) == [f".4.0{UNFINISHED}", f"a/.1.1{UNFINISHED}", f"ab/.3.0{UNFINISHED}"]
    assert storage.names() == ["a/1"]


def test_a_writer_that_was_swept_gets_an_error(tmp_path):
    storage = Storage.open(str(tmp_path))

    def write_too_slowly():
        with storage.write_stream("a") as out:
            out.write(b"half")
            assert len(storage.sweep("", -3600.0)) == 1

    with pytest.raises(OSError, match="somebody swept it") as caught:
        write_too_slowly()
    assert may_pass(caught.value)
    assert storage.names() == []


def test_a_file_where_a_folder_should_be_is_trouble_and_not_an_object_that_exists(tmp_path):
    """Whoever publishes takes FileExistsError for an earlier try of its own; an empty list means a new beginning."""
    storage = Storage.open(str(tmp_path)).child("job")
    storage.create("manifests/1", b"x")
    (tmp_path / "job" / "checkpoints").write_text("a file")
    for path in ("checkpoints/1", "checkpoints/1/2"):
        with pytest.raises(NotADirectoryError):
            storage.create(path, b"x")
    assert storage.names() == ["checkpoints", "manifests/1"]
    (tmp_path / "job").rename(tmp_path / "away")
    assert storage.names("manifests") == []
    (tmp_path / "job").write_text("a file")
    with pytest.raises(NotADirectoryError):
        storage.names("manifests")


def test_chained_file_systems_are_refused():
    with pytest.raises(ValueError, match="plain URI"):
        Storage.open("simplecache::s3://bucket")
