"""Figures that all ranks must agree on: the loss, and the true global norm of the gradient, in one reduction."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate


def local_square(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """This rank's share of the squared gradient norm, float64: their sum over the world has each element once."""
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            continue
        copies = 1
        for axis, placement in enumerate(gradient.placements):
            if isinstance(placement, Replicate):
                copies *= gradient.device_mesh.size(axis)
        local = gradient.to_local()
        total = total.to(local.device) + local.to(torch.float64).square().sum() / copies
    return total


def agree(loss: torch.Tensor, square: torch.Tensor, tokens: torch.Tensor) -> tuple[float, float, float]:
    """(loss, gradient norm, tokens) of the world from each rank's share of loss, squared norm and tokens."""
    shares = torch.stack((loss.to(square), square, tokens.to(square)))
    dist.all_reduce(shares)
    total, squared, count = shares.tolist()
    return total, squared**0.5, count


def clip(gradients: list[torch.Tensor], norm: float, limit: float | None) -> None:
    """Scale in place so that the global norm is at most `limit`."""
    if limit is not None and norm > limit:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
