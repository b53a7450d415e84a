"""Between live tensors and logical ones: the pieces this rank keeps, and how any layout is filled again.

A DTensor on any mesh says itself which box of its logical tensor it holds. Of replicas one is kept: the one
at coordinate 0 of every mesh axis that the tensor is not cut along, so that the union over all ranks has each
element once. Loading needs no collective and no process group: each rank plans from the manifest and reads
only what meets its own box.

Knows nothing of models, or of the names that it is given.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from workers.checkpoint import manifest as manifests
from workers.checkpoint.manifest import BadCheckpoint, Manifest, Stored
from workers.checkpoint.shards import Corrupt, Piece, Reader, Region
from workers.checkpoint.storage import Storage

READ_BYTES = 64 << 20  # held at once by one reading thread, or one row where a row is longer
READERS = 8  # shards read at the same time

State = Mapping[str, torch.Tensor]
Axes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """What this rank holds of a logical tensor."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    kept: bool  # this rank is the one that saves it


class Mismatch(ValueError):
    """The state asked for is not the one in the checkpoint."""


def pieces(
    state: State,
    axes: Axes,
    owner: bool | None = None,
    hold: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
) -> list[Piece]:
    """This rank's pieces of the logical tensors in `state`, stored in the order of dimensions in `axes`.

    Plain tensors have no mesh that says who keeps them: the rank with `owner` true does. None will do for one
    process alone. `hold(name, local)` may put a copy in a kept local tensor's place: bytes are taken later,
    when the piece is written.
    """
    found = []
    for name, tensor in sorted(state.items()):
        box = _box(name, tensor, _owner(name, owner) if not isinstance(tensor, DTensor) else False)
        if not box.kept or (0 in box.extent and 0 not in tensor.shape):
            continue
        order = axes.get(name, tuple(range(tensor.ndim)))
        region = Region(name, tuple(tensor.shape), _dtype(tensor), order, box.offset, box.extent)
        found.append(Piece(region, _bytes(hold(name, _local(tensor)), order)))
    return found


def load(state: State, manifest: Manifest, storage: Storage, readers: Sequence[Reader] | None = None) -> None:
    """Fill the state's tensors in place. Only blocks with bytes of this rank's boxes are read, and verified.

    Raises Mismatch when a tensor is missing or has another shape or dtype there (nothing is filled then), and
    BadCheckpoint when what is read is not what was written (some tensors may be filled then).
    """
    _check(state, manifest)
    readers = readers or manifests.readers(storage, manifest)
    plan: dict[int, list[tuple[int, Callable[[], None]]]] = {}
    for name, tensor in state.items():
        for stored, read in _reads(name, tensor, manifest, readers):
            plan.setdefault(stored.shard, []).append((stored.at, read))

    def run(shard: int) -> None:
        for _, read in sorted(plan[shard], key=lambda item: item[0]):
            read()

    with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-read") as pool:
        try:
            list(pool.map(run, plan))
        except Corrupt as error:
            raise BadCheckpoint(manifest.path, str(error)) from error


def _check(state: State, manifest: Manifest) -> None:
    problems = []
    for name, tensor in sorted(state.items()):
        stored = manifest.tensors.get(name)
        if stored is None:
            problems.append(f"{name} is missing")
        elif stored.shape != tuple(tensor.shape):
            problems.append(f"{name} has shape {stored.shape}, not {tuple(tensor.shape)}")
        elif stored.dtype != _dtype(tensor):
            problems.append(f"{name} is {stored.dtype}, not {_dtype(tensor)}")
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise Mismatch(f"{manifest.path} is of another model or precision: {'; '.join(problems[:5])}{more}")


def _reads(
    name: str, tensor: torch.Tensor, manifest: Manifest, readers: Sequence[Reader]
) -> list[tuple[Stored, Callable[[], None]]]:
    box = _box(name, tensor, owner=True)
    if 0 in box.extent:
        return []
    stored = manifest.tensors[name]
    chunks = [_chunk(piece.offset, piece.extent) for piece in stored.pieces]
    known = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(stored.shape), chunks)
    items = create_read_items_for_chunk_list(name, known, [_chunk(box.offset, box.extent)])
    if sum(math.prod(item.lengths) for item in items) != math.prod(box.extent):
        raise BadCheckpoint(manifest.path, f"the pieces of {name} don't cover {box.extent} at {box.offset}")
    local = _local(tensor)
    reads: list[tuple[Stored, Callable[[], None]]] = []
    for item in items:
        piece = stored.pieces[item.storage_index.index or 0]
        into = local
        for dim, (first, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            into = into.narrow(dim, first, length)
        extent = [piece.extent[axis] for axis in stored.axes] or [1]  # a scalar is one row of one element
        start = [item.storage_offsets[axis] for axis in stored.axes] or [0]
        into = into.permute(stored.axes) if tensor.ndim else into.view(1)
        reads.append((piece, functools.partial(_fill, readers[piece.shard], piece.at, extent, start, into)))
    return reads


@torch.no_grad()
def _fill(reader: Reader, at: int, extent: Sequence[int], start: Sequence[int], into: torch.Tensor) -> None:
    """Copy the box at `start` of a piece into a tensor: whole stored rows are read, and cut in memory."""
    width = math.prod(extent[1:]) * into.element_size()
    at_once = max(1, READ_BYTES // max(1, width))
    for row in range(0, into.shape[0], at_once):
        rows = min(at_once, into.shape[0] - row)
        begin = at + (start[0] + row) * width
        block = torch.frombuffer(reader.read(begin, begin + rows * width), dtype=into.dtype).view(rows, *extent[1:])
        for dim in range(1, into.ndim):
            block = block.narrow(dim, start[dim], into.shape[dim])
        into.narrow(0, row, rows).copy_(block)


def _box(name: str, tensor: torch.Tensor, owner: bool) -> Box:
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape), owner)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Box((0,) * tensor.ndim, (0,) * tensor.ndim, False)
    offset, extent = [0] * tensor.ndim, list(tensor.shape)
    cuts = _cuts(name, tensor)
    for dim, mesh_axes in cuts.items():
        for axis in mesh_axes:  # as torch.chunk cuts
            width = -(-extent[dim] // tensor.device_mesh.size(axis))
            begin = min(coordinate[axis] * width, extent[dim])
            offset[dim] += begin
            extent[dim] = min(width, extent[dim] - begin)
    if tuple(extent) != tuple(tensor._local_tensor.shape):
        raise ValueError(
            f"{name}: the rank holds {tuple(tensor._local_tensor.shape)} where {tensor.placements} of shape "
            f"{tuple(tensor.shape)} give {tuple(extent)}; only cuts as torch.chunk makes them can be stored"
        )
    cut = {axis for mesh_axes in cuts.values() for axis in mesh_axes}
    if 0 in tensor.shape:
        cut = set()  # nobody holds an element: the first rank speaks for all
    kept = all(place == 0 for axis, place in enumerate(coordinate) if axis not in cut)
    return Box(tuple(offset), tuple(extent), kept)


def _cuts(name: str, tensor: DTensor) -> dict[int, list[int]]:
    """Mesh axes that cut each dimension, in the order in which they cut.

    From left to right, but a strided shard comes after as many cuts as its split factor counts: FSDP cuts
    what tensor parallelism has cut, and its mesh axis is further left.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"{name}: {tensor.placements} still has to be reduced")
    if tensor._spec.shard_order is not None:
        return {entry.tensor_dim: list(entry.mesh_dims) for entry in tensor._spec.shard_order}
    cuts: dict[int, list[int]] = {}
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if not isinstance(placement, Shard | _StridedShard):
            continue
        before = cuts.setdefault(placement.dim, [])
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        counts = [math.prod(tensor.device_mesh.size(one) for one in before[:n]) for n in range(len(before) + 1)]
        if factor not in counts:
            raise ValueError(f"{name}: no order of cuts gives {tensor.placements} on {tensor.device_mesh}")
        before.insert(counts.index(factor), axis)
    return cuts


def _owner(name: str, owner: bool | None) -> bool:
    if owner is not None:
        return owner
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(f"{name} is a plain tensor on one of {dist.get_world_size()} ranks: say which is its owner")
    return True


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def _bytes(local: torch.Tensor, axes: tuple[int, ...]) -> Callable[[], memoryview]:
    def data() -> memoryview:
        # numpy has no bfloat16: bytes it is.
        flat = local.to("cpu").permute(axes).contiguous().view(-1).view(torch.uint8)
        return flat.numpy().data

    return data


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _chunk(offset: Collection[int], extent: Collection[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(extent))
