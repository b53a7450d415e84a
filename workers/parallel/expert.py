"""Expert parallelism: each rank of a group has some of the experts, and tokens travel to theirs and back.

The group is a part of dp x tp: its ranks have tokens of their own, which with tp > 1 takes sequence parallelism.
Source: GShard (arXiv 2006.16668), dropless as in MegaBlocks (2211.15841).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from workers.models.moe import Experts
from workers.models.seams import Exchange, Work
from workers.models.sharding import Rules, dimension
from workers.parallel.cuts import Cut, cut


def experts_of(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def apply(model: nn.Module, rules: Rules, mesh: DeviceMesh) -> dict[str, Cut]:
    """Split the experts of `model` over the one-dimensional ep `mesh`. The cuts by name; no communication."""
    found = {}
    for prefix, experts in [named for named in model.named_modules() if isinstance(named[1], Experts)]:
        experts.exchange = AllToAll(mesh)
        for name, _ in list(experts.named_parameters()):
            found[f"{prefix}.{name}"] = cut(experts, name, dimension(rules, f"experts.{name}", "ep"), mesh)
    return found


class AllToAll(Exchange):
    """Rank r of the ep group has the experts from r x experts / ep on."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.size = mesh.get_group(), mesh.size()

    def run(self, rows: torch.Tensor, counts: torch.Tensor, work: Work) -> torch.Tensor:
        if self.size == 1:
            return super().run(rows, counts, work)
        sent = counts.view(self.size, -1)
        arriving = torch.empty_like(sent)  # [from rank, expert here]
        dist.all_to_all_single(arriving, sent.contiguous(), group=self.group)
        outward, inward, each = (one.tolist() for one in (sent.sum(1), arriving.sum(1), arriving.sum(0)))
        came = _Swap.apply(rows, outward, inward, self.group)
        experts = torch.arange(sent.shape[1], device=rows.device).repeat(self.size)
        order = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return _Swap.apply(work(came[order], each)[back], inward, outward, self.group)


class _Swap(torch.autograd.Function):
    """Rows to and from each rank of the group; gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, outward: list[int], inward: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.outward, ctx.inward, ctx.group = outward, inward, group
        return _swapped(rows, outward, inward, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _swapped(gradient, ctx.inward, ctx.outward, ctx.group), None, None, None


def _swapped(rows: torch.Tensor, outward: list[int], inward: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    result = rows.new_empty(sum(inward), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), inward, outward, group=group)
    return result
