"""Manifests: whole or refused, published once, verified."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.checkpoint import manifest, shards
from workers.checkpoint.manifest import BadCheckpoint, Incomplete
from workers.checkpoint.shards import BLOCK, Corrupt


def assemble(storage, records, step=1, attempt=1, token="a"):
    plain = {"job": "j", "layout": {}, "model": {}, "header": {}, "created_at": 0.0}
    return manifest.assemble(storage, step=step, attempt=attempt, token=token, records=records, **plain)


def written(storage, *ranks, folder="checkpoints/0000000001/1-a"):
    return [shards.write(storage, folder, rank, pieces) for rank, pieces in enumerate(ranks)]


def replace(storage, path, data):
    Path(storage.root, path).write_bytes(data)


def test_what_is_published_is_loaded(storage, checkpoint):
    made = checkpoint(storage, 300, 2, "9f3c")
    assert manifest.publish(storage, made) == "manifests/0000000300-000002.json"
    loaded = manifest.load(storage, "manifests/0000000300-000002.json")
    assert loaded == made
    assert manifest.verify(storage, made.path) == made
    assert [shard.path for shard in loaded.shards] == [
        "checkpoints/0000000300/2-9f3c/rank-00000.bin",
        "checkpoints/0000000300/2-9f3c/rank-00001.bin",
    ]


def test_the_manifest_is_version_1(storage, piece):
    """The format on storage, for ever: a change here is a new version."""
    records = written(storage, [piece((0, 0), (2, 3), (4, 3))], [piece((2, 0), (2, 3), (4, 3))])
    data = manifest.encode(assemble(storage, records))
    value = json.loads(data)
    digest = value.pop("digest")
    assert data.startswith(opening := b'{"digest":"%s",' % digest.encode())
    assert digest == shards.digest(data.removeprefix(opening))
    assert value == {
        "format": "phalanx-checkpoint",
        "version": 1,
        "job": "j",
        "step": 1,
        "attempt": 1,
        "token": "a",
        "created_at": 0.0,
        "layout": {},
        "model": {},
        "header": {},
        "shards": [
            {
                "path": f"checkpoints/0000000001/1-a/rank-0000{n}.bin",
                "nbytes": 6,
                "index": f"checkpoints/0000000001/1-a/rank-0000{n}.json",
                "index_digest": record.digest,
            }
            for n, record in enumerate(records)
        ],
        "tensors": {
            "w": {
                "shape": [4, 3],
                "dtype": "uint8",
                "axes": [0, 1],
                "pieces": [
                    {"offset": [0, 0], "extent": [2, 3], "shard": 0, "at": 0},
                    {"offset": [2, 0], "extent": [2, 3], "shard": 1, "at": 0},
                ],
            }
        },
    }


@pytest.mark.parametrize(
    ("shape", "boxes", "why"),
    [
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))], None),
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 4))], None),
        ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))],
         None),
        ((), [((), ())], None),
        ((0, 4), [((0, 0), (0, 4))], None),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (1, 4))], "w: 4 of 16 elements are in no shard"),
        ((4, 4), [((0, 0), (4, 2)), ((0, 3), (4, 1))], "w: 4 of 16 elements are in no shard"),
        ((4, 4), [((0, 0), (3, 4)), ((2, 0), (2, 4))], "overlap .*rank-00000.bin.*rank-00001.bin"),
        ((4, 4), [((0, 0), (4, 3)), ((0, 2), (4, 2))], "overlap"),
        ((4, 4), [((0, 0), (2, 4)), ((0, 0), (2, 4))], "overlap"),
        ((3, 3), [((0, 0), (2, 2)), ((1, 1), (2, 2)), ((2, 0), (1, 1))], "overlap"),
        ((), [((), ()), ((), ())], "overlap"),
    ],
)  # fmt: skip
def test_each_element_is_there_once(storage, piece, shape, boxes, why):
    records = written(storage, *[[piece(offset, extent, shape)] for offset, extent in boxes])
    if why is None:
        assert len(assemble(storage, records).tensors["w"].pieces) == len(boxes)
    else:
        with pytest.raises(Incomplete, match=why):
            assemble(storage, records)


@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    columns=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    shift=st.tuples(st.integers(-1, 1), st.integers(-1, 1)),
    which=st.integers(0, 15),
)
def test_the_sweep_agrees_with_counting(rows, columns, shift, which):
    starts = [list(itertools.accumulate(sizes, initial=0)) for sizes in (rows, columns)]
    shape = (starts[0][-1], starts[1][-1])
    lines = (zip(starts[0], rows, strict=False), zip(starts[1], columns, strict=False))
    boxes = [((r, c), (n, m)) for (r, n), (c, m) in itertools.product(*lines)]
    (r, c), extent = boxes[which % len(boxes)]
    moved = (r + shift[0], c + shift[1])
    if all(0 <= at <= size - n for at, size, n in zip(moved, shape, extent, strict=True)):
        boxes[which % len(boxes)] = (moved, extent)
    counts = [0] * (shape[0] * shape[1])
    for (r, c), (n, m) in boxes:
        for row, column in itertools.product(range(r, r + n), range(c, c + m)):
            counts[row * shape[1] + column] += 1
    pieces = tuple(manifest.Stored(offset, extent, 0, 0) for offset, extent in boxes)
    tensor = manifest.Tensor(shape, "uint8", (0, 1), pieces)
    try:
        manifest._check_cover("w", tensor, [manifest.Shard("s", 0, "i", "d")])
        whole = True
    except Incomplete:
        whole = False
    assert whole == (set(counts) == {1})


def test_ranks_must_agree_on_a_tensor(storage, piece):
    records = written(storage, [piece((0,), (2,), (4,))], [piece((2,), (2,), (5,))])
    with pytest.raises(Incomplete, match=r"w is uint8 \(4,\) stored as \(0,\) in .*rank-00000.bin, but uint8 \(5,\)"):
        assemble(storage, records)


def test_a_shard_of_another_attempt_is_not_assembled(storage, piece):
    mine = written(storage, [piece((0,), (2,), (4,))])
    other = shards.write(storage, "checkpoints/0000000001/2-b", 1, [piece((2,), (2,), (4,))])
    with pytest.raises(Incomplete, match=r"2-b/rank-00001.json is not in checkpoints/0000000001/1-a"):
        assemble(storage, [*mine, other])


def test_an_index_that_changed_is_not_assembled(storage, piece):
    records = written(storage, [piece((0,), (4,), (4,))])
    replace(storage, records[0].index, storage.read(records[0].index).replace(b'"at":0', b'"at":1'))
    with pytest.raises(Corrupt, match=r"rank-00000.json: digest .* is not the expected"):
        assemble(storage, records)


def test_another_manifest_is_not_overwritten(storage, checkpoint):
    made = checkpoint(storage, 5)
    manifest.publish(storage, made)
    manifest.publish(storage, made)  # a request sent again
    with pytest.raises(FileExistsError):
        manifest.publish(storage, dataclasses.replace(made, created_at=1.0))
    assert manifest.load(storage, made.path) == made


def test_a_header_that_json_can_not_hold_is_refused(storage, checkpoint):
    with pytest.raises(ValueError, match="JSON compliant"):
        manifest.publish(storage, dataclasses.replace(checkpoint(storage, 5), header={"loss": float("nan")}))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"samples":40', b'"samples":41', "fails its digest"),
        (b'{"digest":"', b'{"digest": "', "fails its digest"),
        (
            b'"version":1',
            b'"version":9',
            "phalanx-checkpoint version 9; this reads phalanx-checkpoint version 1",
        ),
        (b'"format":"phalanx-checkpoint"', b'"format":"other"', "is other version 1"),
        (b"}}", b"}", "malformed"),
        (b'"format":', b'"farmat":', "malformed"),
    ],
)
def test_a_damaged_manifest_is_bad(storage, checkpoint, old, new, why):
    path = manifest.publish(storage, checkpoint(storage, 5))
    data = storage.read(path)
    assert old in data
    replace(storage, path, data.replace(old, new, 1))
    with pytest.raises(BadCheckpoint, match=why) as caught:
        manifest.load(storage, path)
    assert caught.value.manifest == path
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_bit_flipped_anywhere_in_a_manifest_is_found(storage, checkpoint):
    data = manifest.encode(checkpoint(storage, 5))
    for place, bit in itertools.product(range(len(data)), (1, 0x80)):
        with pytest.raises(BadCheckpoint):
            manifest.decode("m", data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])


def test_a_missing_manifest_is_bad(storage):
    with pytest.raises(BadCheckpoint, match="missing"):
        manifest.load(storage, manifest.path(1, 1))


def test_a_manifest_under_another_name_is_bad(storage, checkpoint):
    manifest.publish(storage, made := checkpoint(storage, 5))
    storage.create(manifest.path(6, 1), manifest.encode(made))
    with pytest.raises(BadCheckpoint, match="is the manifest of step 5, attempt 1"):
        manifest.load(storage, manifest.path(6, 1))


def flip(data):
    return data[:1_500_000] + bytes([data[1_500_000] ^ 1]) + data[1_500_001:]


def cut(data):
    return data[:-1]


@pytest.mark.parametrize(
    ("damage", "why"), [(flip, rf"block {1_500_000 // BLOCK}\) fail their checksum"), (cut, "bytes instead of")]
)
def test_damage_to_a_shard_is_found_and_named(storage, checkpoint, damage, why):
    made = checkpoint(storage, 5)
    path = manifest.publish(storage, made)
    replace(storage, made.shards[1].path, damage(storage.read(made.shards[1].path)))
    with pytest.raises(BadCheckpoint, match=f"rank-00001.bin.*{why}") as caught:
        manifest.verify(storage, path)
    assert caught.value.manifest == path


@pytest.mark.parametrize("files", [["path"], ["index"], ["path", "index"]])
def test_a_shard_of_another_attempt_put_in_is_found_and_named(storage, checkpoint, files):
    mine, other = checkpoint(storage, 5, 1), checkpoint(storage, 5, 2, value=50)
    path = manifest.publish(storage, mine)
    for file in files:
        replace(storage, getattr(mine.shards[1], file), storage.read(getattr(other.shards[1], file)))
    with pytest.raises(BadCheckpoint, match=r"1-t1/rank-00001\.(bin|json)"):
        manifest.verify(storage, path)


def test_newest_first(storage, checkpoint):
    for step, attempt in [(10, 1), (9, 3), (10, 2), (100, 1)]:
        manifest.publish(storage, checkpoint(storage, step, attempt, rows=1))
    storage.create("manifests/notes.txt", b"not a manifest")
    assert manifest.published(storage) == [manifest.path(*key) for key in [(100, 1), (10, 2), (10, 1), (9, 3)]]
    assert manifest.published(storage.child("elsewhere")) == []
