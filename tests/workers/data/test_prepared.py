"""Text made into tokens once: the same tokens as without, in Megatron's files, resumed, verified, and staged."""

from __future__ import annotations

import gzip
import json
import os
import struct
import threading
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workers.data import indexed, prepare, prepared, text, tokens
from workers.data.run import Held, Mapped
from workers.data.staging import Stage
from workers.data.text import DataError

TEXTS = ["one", "two — drei", "", "four\nfive", "six" * 40]


def written(folder: Path) -> str:
    """Five documents in three files of other kinds."""
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in TEXTS[:2]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps({"text": one}) for one in TEXTS[2:4]))
    pq.write_table(pa.table({"text": TEXTS[4:], "id": [1]}), folder / "c.parquet")
    return f"{folder}/*"


def expected() -> np.ndarray:
    return held().ids


def held() -> Held:
    return Held([tokens.tokenizer("byte").encode(one) for one in TEXTS])


def run_of(folder: str, most: int = 1 << 40, cache: Path | None = None) -> Mapped:
    return Mapped(folder, prepared.read(folder), Stage(cache or Path("/nonexistent"), most))


def test_the_tokens_are_those_of_the_text(tmp_path: Path) -> None:
    made = prepare.prepare(written(tmp_path / "text"), str(tmp_path / "out"))
    assert (made.documents, made.tokens, made.dtype) == (5, len(expected()), "uint16")
    assert prepared.found(str(tmp_path / "out"))
    run = run_of(str(tmp_path / "out"))
    assert run.rows(np.array([0]), made.tokens)[0].tolist() == expected().tolist()
    assert run.lengths().tolist() == held().lengths().tolist()


@pytest.mark.parametrize(("field", "value"), [("bin", "../../elsewhere"), ("idx", "/etc/x"), ("dtype", "object")])
def test_what_somebody_wrote_leads_nowhere_else(tmp_path: Path, field: str, value: str) -> None:
    prepare.prepare(written(tmp_path / "text"), str(tmp_path / "out"))
    file = tmp_path / "out" / "tokens.json"
    told = json.loads(file.read_text())
    (told if field == "dtype" else told["shards"][0])[field] = value
    file.write_text(json.dumps(told))
    with pytest.raises(DataError, match=f"is damaged: .*{field}"):
        prepared.read(str(tmp_path / "out"))


def test_any_cut_is_as_in_memory_also_across_shards(tmp_path: Path) -> None:
    made = prepare.prepare(written(tmp_path / "text"), str(tmp_path / "out"), shard_tokens=9)
    assert len(made.shards) == 5
    starts = np.arange(0, made.tokens - 13, 3)
    assert np.array_equal(run_of(str(tmp_path / "out")).rows(starts, 13), held().rows(starts, 13))


def test_the_files_are_as_megatron_reads_them(tmp_path: Path) -> None:
    prepare.prepare(written(tmp_path / "text"), str(tmp_path / "out"))
    data = (tmp_path / "out" / "00000-00000.idx").read_bytes()
    assert data[:9] == b"MMIDIDX\0\0"
    assert struct.unpack_from("<QBQQ", data, 9) == (1, 8, 2, 3)  # version, uint16, two sequences, two documents' ends
    lengths = np.frombuffer(data, "<i4", 2, 34)
    assert lengths.tolist() == [len(one.encode()) + 1 for one in TEXTS[:2]]
    assert np.frombuffer(data, "<i8", 2, 42).tolist() == [0, 2 * lengths[0]]
    assert np.frombuffer(data, "<i8", 3, 58).tolist() == [0, 1, 2]
    ids = np.fromfile(tmp_path / "out" / "00000-00000.bin", "<u2")
    assert ids.tolist() == expected()[: len(ids)].tolist()
    index = indexed.parse(data)
    assert (index.dtype, index.tokens) == (np.uint16, len(ids))


def test_large_vocabularies_have_four_bytes() -> None:
    assert [indexed.dtype_of(size).name for size in (257, 65_499, 65_500, 128_256)] == [
        "uint16", "uint16", "int32", "int32",
    ]  # fmt: skip


@pytest.mark.parametrize("data", [b"", b"MMIDIDX\0\0", b"x" * 60, indexed.HEAD.pack(indexed.MAGIC, 1, 8, 9, 9)])
def test_what_is_no_index(data: bytes) -> None:
    with pytest.raises(ValueError, match="it "):
        indexed.parse(data)


def test_what_is_done_is_not_done_again_and_what_changed_is(tmp_path: Path) -> None:
    source, out = written(tmp_path / "text"), tmp_path / "out"
    (tmp_path / "text" / "d.jsonl").write_text("no JSON")
    with pytest.raises(DataError, match=r"d.jsonl:1 is not JSON"):
        prepare.prepare(source, str(out))
    assert not prepared.found(str(out))
    done = {path.name: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    assert len(done) == 3
    (tmp_path / "text" / "d.jsonl").write_text(json.dumps({"text": "seven"}))
    (tmp_path / "text" / "a.jsonl").write_text(json.dumps({"text": "other"}))
    os.utime(tmp_path / "text" / "a.jsonl", (1, 1))
    told: list[int] = []
    made = prepare.prepare(source, str(out), told=lambda done, files, tokens: told.append(done))
    assert told == [2, 3, 4]
    assert made.documents == 5
    again = {path.name: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    assert {name for name in done if again[name] == done[name]} == {"00001-00000.bin", "00002-00000.bin"}


def test_processes_make_the_same(tmp_path: Path) -> None:
    source = written(tmp_path / "text")
    one = prepare.prepare(source, str(tmp_path / "one"))
    two = prepare.prepare(source, str(tmp_path / "two"), workers=2)
    assert one == two


def test_another_field_and_none(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["one", None, "two"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    uri = f"file://{tmp_path}/a.parquet"
    assert list(text.documents(uri, "body")) == ["one", "two"]
    for field in ("text", "n"):
        with pytest.raises(DataError, match=f"no column of text called '{field}', but body, n"):
            list(text.documents(uri, field))
    (tmp_path / "b.parquet").write_text("no")
    with pytest.raises(DataError, match="is no Parquet file"):
        list(text.documents(f"file://{tmp_path}/b.parquet", "text"))


def test_a_source_without_text_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match="has no text"):
        prepare.prepare(f"{tmp_path}/a.jsonl", str(tmp_path / "out"))
    assert not prepared.found(str(tmp_path / "out"))


def test_every_byte_is_verified(tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = prepare.prepare(written(tmp_path / "text"), str(out))
    assert list(prepared.problems(str(out), made)) == []
    data = bytearray((out / "00001-00000.bin").read_bytes())
    data[3] ^= 1
    (out / "00001-00000.bin").write_bytes(data)
    (out / "00002-00000.idx").unlink()
    first, second = prepared.problems(str(out), made)
    assert first.startswith("00001-00000.bin is not what was written")
    assert second == "00002-00000.idx is not there"


def test_a_file_that_was_cut_is_not_trained_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare.prepare(written(tmp_path / "text"), str(out))
    (out / "00000-00000.bin").write_bytes(b"ab")
    with pytest.raises(DataError, match="has 2 bytes, and"):
        run_of(str(out)).rows(np.array([0]), 4)
    (out / "tokens.json").write_text('{"version": 2}')
    with pytest.raises(DataError, match=r"tokens.json is damaged: version"):
        prepared.read(str(out))


@pytest.fixture
def remote(tmp_path: Path) -> str:
    """Prepared tokens in a store that is not this machine's disk."""
    fsspec.filesystem("memory").rm("/", recursive=True) if fsspec.filesystem("memory").exists("/made") else None
    uri = "memory://made"
    prepare.prepare(written(tmp_path / "text"), uri, shard_tokens=40)
    return uri


def test_a_store_s_files_are_copied_to_the_node_once(remote: str, tmp_path: Path) -> None:
    run = run_of(remote, cache=tmp_path / "cache")
    assert run.rows(np.array([0]), run.tokens)[0].tolist() == expected().tolist()
    copies = {path.name: path.stat().st_ino for path in (tmp_path / "cache").glob("[0-9a-f]*")}
    assert sorted(copies) == sorted({shard.bin for shard in run.shards})
    run_of(remote, cache=tmp_path / "cache").rows(np.array([0]), run.tokens)
    assert copies == {path.name: path.stat().st_ino for path in (tmp_path / "cache").glob("[0-9a-f]*")}


def test_where_they_do_not_fit_samples_are_read_from_the_store(remote: str, tmp_path: Path) -> None:
    run = run_of(remote, most=10, cache=tmp_path / "cache")
    assert run.rows(np.array([3, 50]), 30).tolist() == held().rows(np.array([3, 50]), 30).tolist()
    assert not (tmp_path / "cache").exists()


def test_a_copy_that_is_not_what_was_prepared_is_not_kept(remote: str, tmp_path: Path) -> None:
    name = prepared.read(remote).shards[0].name
    with fsspec.open(f"{remote}/{name}.bin", "wb") as file:
        file.write(b"\0" * 99)
    with pytest.raises(DataError, match="is not what was prepared"):
        run_of(remote, cache=tmp_path / "cache").rows(np.array([0]), 4)
    assert list((tmp_path / "cache").glob("[0-9a-f]*")) == []


def test_the_oldest_copies_make_room(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    stage = Stage(tmp_path / "cache", 250)
    digests = []
    for number in range(3):
        data = bytes([number]) * 100
        memory.pipe_file(f"/room/{number}", data)
        digests.append(prepared._digest(memory, f"/room/{number}"))
        path = stage.local(f"memory://room/{number}", 100, digests[-1])
        os.utime(path, (number, number))
        if number == 1:
            mapped = np.memmap(tmp_path / "cache" / digests[0], np.uint8, "r")
    assert {path.name for path in (tmp_path / "cache").glob("[0-9a-f]*")} == set(digests[1:])
    assert mapped.tolist() == [0] * 100  # who maps it can read on


def test_ranks_of_a_node_copy_a_file_once(remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    real = Stage._fetch

    def fetch(self: Stage, uri: str, copy: Path, digest: str) -> None:
        fetched.append(uri)
        real(self, uri, copy, digest)

    monkeypatch.setattr(Stage, "_fetch", fetch)
    shard = prepared.read(remote).shards[0]
    stage = Stage(tmp_path / "cache", 1 << 30)
    threads = [
        threading.Thread(target=stage.local, args=(f"{remote}/{shard.name}.bin", shard.nbytes, shard.bin))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1
