"""Boxes: cut as torch.chunk cuts, stored in tiles, and filled by exactly what a plan says."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.checkpoint import boxes
from workers.checkpoint.boxes import Box, Mismatch, Read, Wanted
from workers.checkpoint.manifest import BadCheckpoint, Manifest, Stored, Tensor

MIB = 1 << 20


def manifest_of(tensors: dict[str, Tensor]) -> Manifest:
    return Manifest("j", 1, 1, "a", 0.0, {}, {}, {}, (), tensors)


@pytest.mark.parametrize(
    ("shape", "cuts", "offset", "extent"),
    [
        ((10, 3), [], (0, 0), (10, 3)),
        ((10, 3), [(0, 4, 1)], (3, 0), (3, 3)),
        ((10, 3), [(0, 4, 3)], (9, 0), (1, 3)),
        ((10, 3), [(0, 8, 7)], (10, 0), (0, 3)),  # the last ranks get nothing
        ((10, 3), [(0, 2, 1), (0, 2, 0)], (5, 0), (3, 3)),
        ((10, 3), [(0, 2, 1), (0, 2, 1)], (8, 0), (2, 3)),
        ((10, 3), [(1, 3, 2), (0, 2, 0)], (0, 2), (5, 1)),
        ((), [], (), ()),
    ],
)
def test_cuts(shape, cuts, offset, extent):
    assert boxes.cut(shape, cuts) == (offset, extent)


@pytest.mark.parametrize(
    ("extent", "dim", "item_bytes", "rows"),
    [
        ((4096, 1024), 0, 4, [4096]),  # any cut of the first dimension is a run
        ((1024, 4096), 1, 4, [256] * 16),
        ((1024, 1024), 1, 4, [256] * 4),  # none is below a mebibyte
        ((1024, 1000), 1, 4, [334, 334, 332]),
        ((1024, 100), 1, 4, [100]),
        ((MIB, 3), 1, 4, [1, 1, 1]),
        ((MIB, 9), 1, 8, [1] * 9),
        ((MIB, 17), 1, 8, [2] * 8 + [1]),  # sixteen at most
        ((2, MIB, 8), 2, 1, [1] * 8),
        ((MIB,), 0, 8, [MIB]),
        ((), 0, 8, [()]),
    ],
)
def test_tiles(monkeypatch, extent, dim, item_bytes, rows):
    monkeypatch.setattr(boxes, "TILE_BYTES", MIB)
    offset = (7,) * len(extent)
    found = boxes.tiles(Box(offset, extent, True), dim, item_bytes)
    if not extent:
        assert found == [((), ())]
        return
    starts = itertools.accumulate(rows[:-1], initial=7)
    assert found == [
        ((*offset[:dim], at, *offset[dim + 1 :]), (*extent[:dim], size, *extent[dim + 1 :]))
        for at, size in zip(starts, rows, strict=True)
    ]
    assert sum(math.prod(part) for _, part in found) == math.prod(extent)


def cuts_of(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(sizes, min_size=1, max_size=3)


@st.composite
def stored(draw: Any) -> tuple[np.ndarray, Tensor, list[bytes]]:
    """A tensor in a grid of pieces, each anywhere in one of two shards."""
    grid = draw(st.lists(cuts_of(st.integers(1, 4)), max_size=3))
    shape = tuple(map(sum, grid))
    whole = np.arange(1, 1 + math.prod(shape), dtype=np.int32).reshape(shape)
    axes = tuple(draw(st.permutations(range(len(shape)))))
    shards, pieces = [bytearray(), bytearray()], []
    starts = [list(itertools.accumulate(sizes[:-1], initial=0)) for sizes in grid]
    for offset, extent in zip(itertools.product(*starts), itertools.product(*grid), strict=True):
        number = draw(st.integers(0, 1))
        shards[number] += bytes(draw(st.integers(0, 3)))
        pieces.append(Stored(offset, extent, number, len(shards[number])))
        part = whole[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]
        shards[number] += np.ascontiguousarray(part.transpose(axes)).tobytes()
    return whole, Tensor(shape, "int32", axes, tuple(pieces)), [bytes(shard) for shard in shards]


@st.composite
def boxed(draw: Any, shape: tuple[int, ...]) -> Box:
    """Any box, also one of nothing."""
    pairs = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Box(tuple(first for first, _ in pairs), tuple(last - first for first, last in pairs), False)


def filled(box: Box, reads: dict[int, list[Read]], shards: list[bytes]) -> np.ndarray:
    """As a loader does it: whole stored rows, cut in memory."""
    out = np.zeros(box.extent, np.int32)
    for shard, mine in reads.items():
        for read in mine:
            assert read.shard == shard
            rows = np.frombuffer(shards[shard][read.begin : read.end], np.int32).reshape(-1, *read.piece[1:])
            lengths = [read.extent[axis] for axis in read.axes]
            inner = zip(read.start[1:], lengths[1:], strict=True)
            part = rows[(slice(None), *(slice(at, at + size) for at, size in inner))]
            into = out[(..., *(slice(at, at + size) for at, size in zip(read.into, read.extent, strict=True)))]
            assert not into.any(), "an element is read twice"
            into.transpose(read.axes)[...] = part.reshape(lengths)
    return out


@given(st.data())
def test_a_plan_fills_a_box(data):
    whole, tensor, shards = data.draw(stored())
    box = data.draw(boxed(tensor.shape))
    reads = boxes.plan({"w": Wanted(tensor.shape, "int32", box)}, manifest_of({"w": tensor}))
    expected = whole[tuple(slice(at, at + size) for at, size in zip(box.offset, box.extent, strict=True))]
    np.testing.assert_array_equal(filled(box, reads, shards), expected)
    for mine in reads.values():
        assert [read.begin for read in mine] == sorted(read.begin for read in mine)
        size = data.draw(st.integers(1, 9))
        touched = {number for read in mine for number in range(read.begin // size, (read.end - 1) // size + 1)}
        assert [number for run in boxes.blocks(mine, size) for number in run] == sorted(touched)


@given(st.data())
def test_a_hole_is_found(data):
    _, tensor, _ = data.draw(stored())
    lost = data.draw(st.integers(0, len(tensor.pieces) - 1))
    rest = dataclasses.replace(tensor, pieces=tensor.pieces[:lost] + tensor.pieces[lost + 1 :])
    box = Box((0,) * len(tensor.shape), tensor.shape, False)
    with pytest.raises(BadCheckpoint, match="the pieces of w don't cover"):
        boxes.plan({"w": Wanted(tensor.shape, "int32", box)}, manifest_of({"w": rest}))


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "why"),
    [
        ("v", (2,), "int32", "v is missing"),
        ("w", (3,), "int32", r"w has shape \(2,\), not \(3,\)"),
        ("w", (2,), "int64", "w is int32, not int64"),
    ],
)
def test_another_tensor_is_refused(name, shape, dtype, why):
    known = manifest_of({"w": Tensor((2,), "int32", (0,), (Stored((0,), (2,), 0, 0),))})
    with pytest.raises(Mismatch, match=why):
        boxes.plan({name: Wanted(shape, dtype, Box((0,), shape, False))}, known)
