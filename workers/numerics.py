"""Figures that all ranks must agree on: the loss, and the true global norm of the gradient, in one reduction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate


def local_square(gradients: Sequence[torch.Tensor], shares: torch.Tensor) -> torch.Tensor:
    """This rank's share of the squared gradient norm, float64: their sum over the world has each element once.

    `shares`: of each gradient, one over the number of ranks that have the same part of it.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=shares.device)
    norms = torch.stack(torch._foreach_norm(list(gradients), dtype=torch.float64))
    return (norms.square() * shares).sum()


def copies(tensor: torch.Tensor) -> int:
    """Ranks that hold the same elements."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if isinstance(placement, Replicate))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def agree(
    loss: torch.Tensor, square: torch.Tensor, tokens: torch.Tensor, aside: Sequence[float] = ()
) -> tuple[float, float, float, tuple[float, ...]]:
    """(loss, gradient norm, tokens) of the world from each rank's share of loss, squared norm and tokens; and the sums
    over ranks of what else each one has to say."""
    shares = torch.cat((torch.stack((loss.to(square), square, tokens.to(square))), square.new_tensor(aside)))
    dist.all_reduce(shares)
    total, squared, count, *sums = shares.tolist()
    return total, squared**0.5, count, tuple(sums)


def clip(gradients: list[torch.Tensor], norm: float, limit: float | None) -> None:
    """Scale in place so that the global norm is at most `limit`."""
    if limit is not None and norm > limit and gradients:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))


def drifted(named: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors whose copies on other ranks differ in any bit; known to all ranks that hold a copy.

    Only copies along a mesh axis are compared: what is sharded has none. Called by all ranks in the same order.
    """
    by_group: dict[dist.ProcessGroup, list[str]] = {}
    for name, tensor in named.items():
        if not isinstance(tensor, DTensor):
            continue
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate) and tensor.device_mesh.size(axis) > 1:
                by_group.setdefault(tensor.device_mesh.get_group(axis), []).append(name)
    found: set[str] = set()
    for group, names in by_group.items():
        prints = torch.stack([fingerprint(named[name]) for name in names])
        least, most = prints.clone(), prints
        dist.all_reduce(least, dist.ReduceOp.MIN, group)
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
        found.update(name for name, same in zip(names, (least == most).tolist(), strict=True) if not same)
    return sorted(found)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 that another value of any one element changes, whatever its place."""
    own = local(tensor)
    bits = own.detach().contiguous().view(-1).view(BITS[own.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(CHUNK):
        odd = torch.arange(1, 2 * len(chunk), 2, device=bits.device)  # an odd factor loses no bit
        total = total * 31 + (chunk.to(torch.int64) * odd).sum()
    return total


CHUNK = 1 << 22
"""Elements that are widened at once."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
