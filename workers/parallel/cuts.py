"""How one axis cuts a parameter, and what the ranks then hold of it as a DTensor: for state, norms and checkpoints.

In the model itself a parameter is a plain tensor, this rank's part: products should not pay for bookkeeping.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from workers.numerics import local


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    shape: torch.Size  # of the whole
    dim: int | None = None  # None: every rank has it whole
    partial: bool = False  # every rank has it whole and sees a part of its gradient, which is their sum


def cut(module: nn.Module, name: str, dim: int | None, mesh: DeviceMesh, partial: bool = False) -> Cut:
    """Leave this rank's part of a parameter, which every rank has whole; cut as torch.chunk does."""
    whole = getattr(module, name)
    if dim is not None:
        rank, chunk = mesh.get_local_rank(), -(-whole.shape[dim] // mesh.size())
        start = min(rank * chunk, whole.shape[dim])
        part = whole.detach().narrow(dim, start, min(chunk, whole.shape[dim] - start)).clone()
        module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
    return Cut(whole.shape, dim, partial)


def placed(tensor: torch.Tensor, known: Cut | None, mesh: DeviceMesh) -> DTensor:
    """This rank's part of a tensor on `mesh`: axes of copies, of shards, and of the cut. Shares its memory.

    `tensor` is sharded on its first dimension after the cut, as `fully_shard` does, or not at all.
    """
    dim, ranks = (known.dim if known else None), mesh.size(2)
    inner: Placement = Replicate() if dim is None else Shard(dim)
    shard: Placement = Replicate()
    if isinstance(tensor, DTensor):
        shard = _StridedShard(0, split_factor=ranks) if dim == 0 and ranks > 1 else Shard(0)
    shape = known.shape if known else tensor.shape
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    placements = [Replicate(), shard, inner]
    return DTensor.from_local(local(tensor), mesh, placements, run_check=False, shape=shape, stride=stride)
