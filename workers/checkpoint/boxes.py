"""Boxes of logical tensors: how cuts make them, how they are stored, and which stored bytes fill them. No torch.

Knows a manifest's tensors; neither live ones nor storage. What a plan says is what a load reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from workers.checkpoint.manifest import BadCheckpoint, Manifest, Stored, Tensor
from workers.checkpoint.shards import ITEM_BYTES

Shape = tuple[int, ...]
Cut = tuple[int, int, int]
"""Dimension, number of parts, and which of them."""

TILES, TILE_BYTES = 16, 4 << 20
"""A piece is stored in at most so many tiles, none smaller than this."""


class Mismatch(ValueError):
    """The state asked for is not the one in the checkpoint."""


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """What a rank holds of a logical tensor."""

    offset: Shape
    extent: Shape
    kept: bool  # this rank is the one that saves it


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """A logical tensor as a rank has it, and the box to be filled."""

    shape: Shape
    dtype: str
    box: Box


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """What a box and a stored piece have in common, and the whole stored rows that hold it."""

    tensor: str
    shard: int
    at: int  # byte of the shard where the piece begins
    piece: Shape  # extent of the piece, in stored order as `start`
    start: Shape  # of the common part in the piece
    into: Shape  # of the common part in the box, in logical order as `extent`
    extent: Shape  # of the common part
    axes: Shape  # stored order of the dimensions
    begin: int  # bytes of the shard
    end: int


def cut(shape: Iterable[int], cuts: Iterable[Cut]) -> tuple[Shape, Shape]:
    """(offset, extent) after one cut upon the other, each as torch.chunk makes it."""
    extent = list(shape)
    offset = [0] * len(extent)
    for dim, parts, part in cuts:
        width = -(-extent[dim] // parts)
        begin = min(part * width, extent[dim])
        offset[dim] += begin
        extent[dim] = min(width, extent[dim] - begin)
    return tuple(offset), tuple(extent)


def tiles(box: Box, dim: int, item_bytes: int) -> list[tuple[Shape, Shape]]:
    """(offset, extent) of the parts that a box is stored in, each in natural order.

    Rows are runs of bytes, so that another cut along dimension 0 costs nothing to read. Where tensor parallelism cuts
    along another `dim`, a row would be read for a part of it: so the box is stored in tiles along that one. To store it
    turned instead would do as well, but for the time that turning takes at every save and load.
    """
    if dim == 0:
        return [(box.offset, box.extent)]
    size = math.prod(box.extent) * item_bytes
    count = max(1, min(TILES, size // TILE_BYTES, box.extent[dim]))
    cuts = [cut(box.extent, [(dim, count, number)]) for number in range(count)]
    return [
        (tuple(first + begin for first, begin in zip(box.offset, offset, strict=True)), extent)
        for offset, extent in cuts
        if 0 not in extent
    ]


def plan(wanted: Mapping[str, Wanted], manifest: Manifest) -> dict[int, list[Read]]:
    """What fills all boxes: by shard, in the order of its bytes.

    Raises Mismatch when a tensor is missing or has another shape or dtype, BadCheckpoint when its pieces have a hole.
    """
    _check(wanted, manifest)
    reads: dict[int, list[Read]] = {}
    for name, one in wanted.items():
        tensor, missing = manifest.tensors[name], math.prod(one.box.extent)
        for piece in tensor.pieces:
            read = _read(name, tensor, piece, one.box)
            if read is not None:
                reads.setdefault(piece.shard, []).append(read)
                missing -= math.prod(read.extent)
        if missing:
            raise BadCheckpoint(manifest.path, f"the pieces of {name} don't cover {one.box.extent} at {one.box.offset}")
    for shard in reads.values():
        shard.sort(key=lambda read: read.begin)
    return reads


def _check(wanted: Mapping[str, Wanted], manifest: Manifest) -> None:
    problems = []
    for name, one in sorted(wanted.items()):
        stored = manifest.tensors.get(name)
        if stored is None:
            problems.append(f"{name} is missing")
        elif stored.shape != one.shape:
            problems.append(f"{name} has shape {stored.shape}, not {one.shape}")
        elif stored.dtype != one.dtype:
            problems.append(f"{name} is {stored.dtype}, not {one.dtype}")
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise Mismatch(f"{manifest.path} is of another model or precision: {'; '.join(problems[:5])}{more}")


def _read(name: str, tensor: Tensor, piece: Stored, box: Box) -> Read | None:
    into, start, extent = [], [], []
    for mine, length, its, size in zip(box.offset, box.extent, piece.offset, piece.extent, strict=True):
        first, last = max(mine, its), min(mine + length, its + size)
        if first >= last:
            return None
        into.append(first - mine)
        start.append(first - its)
        extent.append(last - first)
    order = tensor.axes
    whole = tuple(piece.extent[axis] for axis in order) or (1,)  # a scalar is one row of one element
    begin = tuple(start[axis] for axis in order) or (0,)
    rows = extent[order[0]] if order else 1
    width = math.prod(whole[1:]) * ITEM_BYTES[tensor.dtype]
    first_byte = piece.at + begin[0] * width
    return Read(
        name, piece.shard, piece.at, whole, begin, tuple(into), tuple(extent), order, first_byte,
        first_byte + rows * width,
    )  # fmt: skip


def blocks(reads: Iterable[Read], size: int) -> list[range]:
    """Checksum blocks of `size` bytes that one shard's reads touch, in the order of `plan`, each block once."""
    found: list[range] = []
    for read in reads:
        first, end = read.begin // size, -(-read.end // size)
        if found and first <= found[-1].stop:
            found[-1] = range(found[-1].start, max(end, found[-1].stop))
        else:
            found.append(range(first, end))
    return found
