"""Between live tensors and logical ones: the pieces this rank keeps, and how any layout is filled again.

A DTensor on any mesh says itself which box of its logical tensor it holds. Of replicas one is kept: the one
at coordinate 0 of every mesh axis that the tensor is not cut along, so that the union over all ranks has each
element once. Loading needs no collective and no process group: each rank plans from the manifest and reads
only what meets its own box.

Knows nothing of models, or of the names that it is given.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from workers.checkpoint import boxes
from workers.checkpoint import manifest as manifests
from workers.checkpoint.boxes import Box, Mismatch, Read, Wanted
from workers.checkpoint.manifest import BadCheckpoint, Manifest
from workers.checkpoint.shards import ITEM_BYTES, Corrupt, Piece, Reader, Region
from workers.checkpoint.storage import Storage

TASK_BYTES = 16 << 20  # read by one thread before it looks for more
ROWS_BYTES = 2 << 20  # of stored rows, held at once where they can't be read to their place; one row at least
READERS = 4  # threads

State = Mapping[str, torch.Tensor]
Slices = Mapping[str, int]
Rows = tuple[Read, int, int]
"""Of a read: the first, and how many."""


__all__ = ["Mismatch", "load", "pieces"]


def pieces(
    state: State,
    slices: Slices,
    owner: bool | None = None,
    hold: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
) -> list[Piece]:
    """This rank's pieces of the logical tensors in `state`. `slices`: the dimension along which tensor parallelism cuts
    a tensor, where that is not the first one.

    Plain tensors have no mesh that says who keeps them: the rank with `owner` true does. None will do for one
    process alone. `hold(name, local)` may put a copy in a kept local tensor's place: bytes are taken later,
    when the piece is written.
    """
    found = []
    for name, tensor in sorted(state.items()):
        box = _box(name, tensor, _owner(name, owner) if not isinstance(tensor, DTensor) else False)
        if not box.kept or (0 in box.extent and 0 not in tensor.shape):
            continue
        dim, dtype, held = slices.get(name, 0), _dtype(tensor), hold(name, _local(tensor))
        natural = tuple(range(tensor.ndim))
        for offset, extent in boxes.tiles(box, dim, ITEM_BYTES.get(dtype, 1)):
            part = held if extent == box.extent else held.narrow(dim, offset[dim] - box.offset[dim], extent[dim])
            found.append(Piece(Region(name, tuple(tensor.shape), dtype, natural, offset, extent), _bytes(part)))
    return found


def load(state: State, manifest: Manifest, storage: Storage, readers: Sequence[Reader] | None = None) -> None:
    """Fill the state's tensors in place. Only blocks with bytes of this rank's boxes are read, and verified.

    Raises Mismatch when a tensor is missing or has another shape or dtype there (nothing is filled then), and
    BadCheckpoint when what is read is not what was written (some tensors may be filled then).
    """
    reads = boxes.plan({name: _wanted(name, tensor) for name, tensor in state.items()}, manifest)
    readers = readers or manifests.readers(storage, manifest)

    scratch = Scratch()

    def run(task: list[Rows]) -> None:
        for read, first, count in task:
            _fill(readers[read.shard], read, first, _into(state[read.tensor], read, first, count), scratch)

    with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-read") as pool:
        try:
            list(pool.map(run, [task for shard in reads.values() for task in _tasks(shard)]))
        except Corrupt as error:
            raise BadCheckpoint(manifest.path, str(error)) from error


def held(name: str, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]:
    """What this rank holds of a logical tensor: its offset and extent there, and the memory that it is in."""
    box = _box(name, tensor, owner=True)
    return tuple(box.offset), tuple(box.extent), _local(tensor)


class Scratch(threading.local):
    """Memory of each thread for itself: new memory costs more than what is done with it here."""

    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}

    def of(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if use not in self.memory or len(self.memory[use]) < nbytes:
            self.memory[use] = torch.empty(nbytes, dtype=torch.uint8)
        return self.memory[use][:nbytes].view(dtype).view(*shape)


def _tasks(reads: Sequence[Read]) -> Iterator[list[Rows]]:
    """The reads of one shard, in its order, as work for threads: small ones together, large ones in parts."""
    task: list[Rows] = []
    room = TASK_BYTES
    for read in reads:
        rows = read.extent[read.axes[0]] if read.axes else 1
        width, first = (read.end - read.begin) // rows, 0
        while first < rows:
            count = min(rows - first, max(1, room // width))
            task.append((read, first, count))
            first, room = first + count, room - count * width
            if room < width:
                yield task
                task, room = [], TASK_BYTES
    if task:
        yield task


def _wanted(name: str, tensor: torch.Tensor) -> Wanted:
    return Wanted(tuple(tensor.shape), _dtype(tensor), _box(name, tensor, owner=True))


def _into(tensor: torch.Tensor, read: Read, first: int, count: int) -> torch.Tensor:
    """The part that some rows of a read fill."""
    part = _local(tensor)
    if not read.axes:
        return part.view(1)
    for dim, (begin, length) in enumerate(zip(read.into, read.extent, strict=True)):
        part = part.narrow(dim, begin, length)
    return part.narrow(read.axes[0], first, count)


@torch.no_grad()
def _fill(reader: Reader, read: Read, first: int, into: torch.Tensor, scratch: Scratch) -> None:
    """Rows of a read, from the one numbered `first` on: to their place, or by way of a block in stored order."""
    axes = read.axes or (0,)
    stored, item = into.permute(axes), into.element_size()
    rows, width = stored.shape[0], math.prod(read.piece[1:]) * item
    begin = read.begin + first * width
    if into.device.type == "cpu" and stored.is_contiguous() and rows * width == stored.nbytes:
        reader.read_into(begin, _memory(stored))
        return
    at_once = min(rows, max(1, ROWS_BYTES // width))
    block = scratch.of("rows", (at_once, *read.piece[1:]), into.dtype)
    back = sorted(range(len(axes)), key=axes.__getitem__)  # from stored order to the tensor's
    for row in range(0, rows, at_once):
        part = block[: min(at_once, rows - row)]
        reader.read_into(begin + row * width, _memory(part))
        count = len(part)
        for dim in range(1, part.ndim):
            part = part.narrow(dim, read.start[dim], stored.shape[dim])
        part, place = part.permute(back), into.narrow(axes[0], row, count)
        if not part.is_contiguous() and not place.is_contiguous():  # several times faster in two steps
            part = scratch.of("turned", part.shape, part.dtype).copy_(part)
        place.copy_(part)


def _memory(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor. numpy has no bfloat16: bytes it is."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _box(name: str, tensor: torch.Tensor, owner: bool) -> Box:
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape), owner)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Box((0,) * tensor.ndim, (0,) * tensor.ndim, False)
    cuts = _cuts(name, tensor)
    offset, extent = boxes.cut(
        tensor.shape,
        [
            (dim, tensor.device_mesh.size(axis), coordinate[axis])
            for dim, mesh_axes in cuts.items()
            for axis in mesh_axes
        ],
    )
    if extent != tuple(tensor._local_tensor.shape):
        raise ValueError(
            f"{name}: the rank holds {tuple(tensor._local_tensor.shape)} where {tensor.placements} of shape "
            f"{tuple(tensor.shape)} give {extent}; only cuts as torch.chunk makes them can be stored"
        )
    cut = {axis for mesh_axes in cuts.values() for axis in mesh_axes}
    if 0 in tensor.shape:
        cut = set()  # nobody holds an element: the first rank speaks for all
    kept = all(place == 0 for axis, place in enumerate(coordinate) if axis not in cut)
    return Box(offset, extent, kept)


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


def _bytes(local: torch.Tensor) -> Callable[[], memoryview]:
    def data() -> memoryview:
        return _memory(local.to("cpu").contiguous())

    return data


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
