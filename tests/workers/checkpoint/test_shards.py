"""Shards: what was written is read, any range of it; what was damaged is found and named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.checkpoint import shards
from workers.checkpoint.shards import ALIGN, BLOCK, Corrupt, Piece, Reader, Region
from workers.checkpoint.storage import LocalStorage, Storage


class Counted(LocalStorage):
    """Remembers the byte ranges that were asked for."""

    def read(self, path, start=None, end=None):
        self.__dict__.setdefault("ranges", []).append((start, end))
        return super().read(path, start, end)

    def read_into(self, path, start, out):
        self.__dict__.setdefault("ranges", []).append((start, start + len(out)))
        return super().read_into(path, start, out)


def whole(name: str, data: bytes) -> Piece:
    return Piece(Region(name, (len(data),), "uint8", (0,), (0,), (len(data),)), lambda: data)


def pattern(length: int, seed: int) -> bytes:
    return bytes((seed * 31 + n * 7) % 251 for n in range(251)) * (length // 251 + 1)


def written(storage: Storage, *sizes: int) -> tuple[Reader, bytes]:
    pieces = [whole(f"t{n}", pattern(size, n)[:size]) for n, size in enumerate(sizes)]
    record = shards.write(storage, "checkpoints/1/1-a", 3, pieces)
    return Reader(storage, record.index, record.digest), storage.read("checkpoints/1/1-a/rank-00003.bin")


def test_pieces_are_aligned_and_whole(storage):
    sizes = (1, 63, 64, 65, BLOCK, 0, 3 * BLOCK + 5)
    reader, data = written(storage, *sizes)
    assert reader.path == "checkpoints/1/1-a/rank-00003.bin"
    for number, (size, entry) in enumerate(zip(sizes, reader.index.entries, strict=True)):
        assert entry.at % ALIGN == 0
        assert (
            reader.read(entry.at, entry.at + size) == data[entry.at : entry.at + size] == pattern(size, number)[:size]
        )
    reader.verify()


def test_the_index_is_version_1(storage):
    """The format on storage, for ever: a change here is a new version."""
    piece = Piece(Region("w", (4, 6), "float32", (1, 0), (0, 2), (4, 3)), lambda: bytes(48))
    record = shards.write(storage, "f", 0, [piece])
    assert json.loads(storage.read("f/rank-00000.json")) == {
        "format": "phalanx-shard",
        "version": 1,
        "file": "rank-00000.bin",
        "nbytes": 48,
        "byte_order": "little",
        "checksum": "xxh3-128",
        "block_bytes": 262144,
        "blocks": ["505cd4e066810498e255222d4cbbadba"],
        "pieces": [
            {"tensor": "w", "shape": [4, 6], "dtype": "float32", "axes": [1, 0],
             "offset": [0, 2], "extent": [4, 3], "at": 0},
        ],
    }  # fmt: skip
    assert record == shards.ShardRecord("f/rank-00000.json", shards.digest(storage.read("f/rank-00000.json")), 48)


@pytest.mark.parametrize("block", [64, 96 << 10, 1 << 20, 5 << 20])
def test_blocks_have_the_size_that_the_index_says(storage, block):
    """Version 1 was once written with blocks of 1 MiB."""
    content = pattern(6 * BLOCK + 17, 1)[: 6 * BLOCK + 17]
    sums = tuple(shards.digest(content[at : at + block]) for at in range(0, len(content), block))
    region = whole("t", content).region
    index = shards.encode(shards.Index("rank-00000.bin", len(content), block, sums, (shards.Entry(region, 0),)))
    storage.create("f/rank-00000.bin", content)
    storage.create("f/rank-00000.json", index)
    reader = Reader(storage, "f/rank-00000.json", shards.digest(index))
    for start, end in [
        (0, len(content)),
        (5, min(block, BLOCK) + 5),
        (2 * BLOCK, len(content)),
        (BLOCK - 1, BLOCK + 1),
    ]:
        assert reader.read(start, end) == content[start:end]
    reader.verify()
    Path(storage.root, "f/rank-00000.bin").write_bytes(content[:-1] + b"?")
    with pytest.raises(Corrupt, match=rf"\(block {len(sums) - 1}\) fail their checksum"):
        Reader(storage, "f/rank-00000.json", shards.digest(index)).read(0, len(content))


def test_bytes_are_read_to_where_they_shall_be_and_nowhere_else(storage):
    reader, data = written(storage, 20 * BLOCK + 17)  # more than is asked of storage at once
    out = bytearray(b"?") * (19 * BLOCK + 9)
    reader.read_into(BLOCK - 3, memoryview(out)[4:-5])
    assert out == b"????" + data[BLOCK - 3 : 20 * BLOCK - 3] + b"?????"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_range_reads_what_was_written(data, tmp_path_factory):
    storage = Storage.open(str(tmp_path_factory.getbasetemp() / "ranges"))
    if not storage.exists("checkpoints/1/1-a/rank-00003.json"):
        written(storage, 3 * BLOCK + 17)
    index = storage.read("checkpoints/1/1-a/rank-00003.json")
    reader = Reader(storage, "checkpoints/1/1-a/rank-00003.json", shards.digest(index))
    content = pattern(3 * BLOCK + 17, 0)[: 3 * BLOCK + 17]
    for _ in range(3):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, len(content)))
        assert reader.read(start, end) == content[start:end]


def test_only_the_blocks_touched_are_read_and_each_once(tmp_path):
    storage = Counted.open(str(tmp_path))
    counted = Counted(storage.fs, storage.root, storage.uri)
    reader, _ = written(counted, 10 * BLOCK)
    assert reader.index.nbytes == 10 * BLOCK
    counted.ranges.clear()
    reader.read(BLOCK + 5, BLOCK + 10)
    reader.read(BLOCK + 10, 3 * BLOCK - 1)
    reader.read(3 * BLOCK - 1, 3 * BLOCK)
    assert counted.ranges == [(BLOCK, 2 * BLOCK), (2 * BLOCK, 3 * BLOCK)]


@pytest.mark.parametrize("byte", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 3, 3 * BLOCK + 16])
def test_one_bit_flipped_is_found_where_it_is_and_nowhere_else(storage, byte):
    reader, data = written(storage, 3 * BLOCK + 17)
    file = Path(storage.root, reader.path)
    file.write_bytes(data[:byte] + bytes([data[byte] ^ 4]) + data[byte + 1 :])
    with pytest.raises(Corrupt, match=rf"rank-00003\.bin: bytes .* \(block {byte // BLOCK}\) fail their checksum"):
        reader.read(byte, byte + 1)
    with pytest.raises(Corrupt, match="checksum"):
        reader.verify()
    for block in set(range(4)) - {byte // BLOCK}:
        reader.read(block * BLOCK, min(block * BLOCK + 9, len(data)))


@pytest.mark.parametrize("keep", [0, 5, BLOCK, 3 * BLOCK + 16])
def test_a_shard_cut_short_is_found(storage, keep):
    reader, data = written(storage, 3 * BLOCK + 17)
    Path(storage.root, reader.path).write_bytes(data[:keep])
    with pytest.raises(Corrupt, match=rf"cut short: ends at byte {keep} of {len(data)}"):
        reader.read(0, len(data))
    with pytest.raises(Corrupt, match=f"has {keep} bytes instead of {len(data)}"):
        reader.verify()


@pytest.mark.parametrize("suffix", ["bin", "json"])
def test_a_missing_file_is_named(storage, suffix):
    reader, _ = written(storage, 100)
    storage.delete(f"checkpoints/1/1-a/rank-00003.{suffix}")
    for call in (lambda: reader.read(0, 10), reader.verify):
        with pytest.raises(Corrupt, match=rf"rank-00003\.{suffix}: missing"):
            call()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "phalanx-shard version 2; this reads phalanx-shard version 1"),
        ({"blocks": []}, "0 checksums for 100 bytes"),
        ({"file": "../x.bin"}, "malformed"),
        ({"pieces": [{"tensor": "w"}]}, "malformed: KeyError"),
        ({"nbytes": 64}, "t0 at byte 0 is not inside 64 bytes"),
    ],
)
def test_a_wrong_index_is_refused(storage, change, why):
    written(storage, 100)
    value = json.loads(storage.read("checkpoints/1/1-a/rank-00003.json")) | change
    storage.create("checkpoints/1/1-a/other.json", json.dumps(value).encode())
    digest = shards.digest(storage.read("checkpoints/1/1-a/other.json"))
    with pytest.raises(Corrupt, match=why):
        shards.read_index(storage, "checkpoints/1/1-a/other.json", digest)


def test_a_key_that_is_not_known_is_passed_over(storage):
    written(storage, 100)
    value = json.loads(storage.read("checkpoints/1/1-a/rank-00003.json")) | {"later": 1}
    storage.create("checkpoints/1/1-a/later.json", json.dumps(value).encode())
    digest = shards.digest(storage.read("checkpoints/1/1-a/later.json"))
    assert shards.read_index(storage, "checkpoints/1/1-a/later.json", digest).nbytes == 100


@pytest.mark.parametrize(
    ("shape", "dtype", "axes", "offset", "extent", "why"),
    [
        ((4, 4), "complex64", (0, 1), (0, 0), (4, 4), "can't be stored"),
        ((4, 4), "float32", (0, 0), (0, 0), (4, 4), "no order of 2 dimensions"),
        ((4, 4), "float32", (0,), (0, 0), (4, 4), "no order of 2 dimensions"),
        ((4, 4), "float32", (0, 1), (3, 0), (2, 4), "not inside shape"),
        ((4, 4), "float32", (0, 1), (0, 0), (4,), "not inside shape"),
        ((4, 4), "float32", (0, 1), (-1, 0), (2, 4), "not inside shape"),
    ],
)
def test_an_impossible_region_can_not_be_built(shape, dtype, axes, offset, extent, why):
    with pytest.raises(ValueError, match=why):
        Region("w", shape, dtype, axes, offset, extent)


def test_a_piece_of_the_wrong_length_leaves_no_shard(storage):
    short = Piece(Region("w", (8,), "float32", (0,), (0,), (8,)), lambda: bytes(31))
    with pytest.raises(ValueError, match="w: 31 bytes for a piece of 32"):
        shards.write(storage, "f", 0, [short])
    assert storage.names() == []


def test_corrupt_crosses_processes():
    again = pickle.loads(pickle.dumps(Corrupt("a/b", "cut short")))
    assert (again.path, again.why) == ("a/b", "cut short")
