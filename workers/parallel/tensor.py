"""Tensor parallelism: weights split by heads, features and vocabulary over the tp axis (Megatron-LM, arXiv 1909.08053).

A parameter becomes this rank's part of it, a plain tensor; between the parts plain collectives. Key and value heads
fewer than tp are on several ranks, and stored once. With sequence parallelism (arXiv 2205.05198) what lies between the
blocks is split by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from workers.models.seams import IGNORED, Seams, widened
from workers.models.sharding import Rules, dimension, of_another, shared
from workers.models.spec import ModelSpec
from workers.parallel.cuts import Cut, cut


def apply(
    model: nn.Module, rules: Rules, spec: ModelSpec, vocab_size: int, mesh: DeviceMesh, split_sequence: bool
) -> dict[str, Cut]:
    """Split the parameters of `model` over the one-dimensional tp `mesh`, and fill its seams. The cuts by name.

    What `rules` give to another axis is left alone; a group of one leaves everything as it is. No communication.
    """
    if mesh.size() == 1:
        return {}
    seams = (SequenceSeams if split_sequence else TensorSeams)(spec, vocab_size, mesh)
    for module in model.modules():
        if hasattr(module, "seams"):
            module.seams = seams
    kv_whole = spec.kv_heads % mesh.size() != 0
    found = {}
    for prefix, module in model.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            full = f"{prefix}.{name}"
            if of_another(rules, full, "tp"):
                continue
            copied = kv_whole and prefix.endswith((".wk", ".wv"))
            dim = None if copied else dimension(rules, full, "tp")
            partial = copied or shared(rules, full, "tp") or (split_sequence and dim is None)
            found[full] = cut(module, name, dim, mesh, partial)
    return found


def reduce(partial: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum gradients of which each rank has a part, all in one collective."""
    if partial:
        flat = torch.cat([gradient.flatten() for gradient in partial])
        dist.all_reduce(flat, group=group)
        sums = flat.split([gradient.numel() for gradient in partial])
        torch._foreach_copy_(list(partial), [one.view_as(to) for one, to in zip(sums, partial, strict=True)])


class TensorSeams(Seams):
    """The seams of one rank in a tp group."""

    def __init__(self, spec: ModelSpec, vocab_size: int, mesh: DeviceMesh) -> None:
        self.group, size, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.kv_rows: slice | None = None
        if spec.kv_heads % size:
            head = rank * spec.kv_heads // size
            self.kv_rows = slice(head * spec.head_dim, (head + 1) * spec.head_dim)
        self.vocab_start = min(rank * -(-vocab_size // size), vocab_size)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return _CopyIn.apply(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return _SumOut.apply(x, self.group)

    def kv(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if self.kv_rows is None else weight[self.kv_rows]

    def embed(self, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        local = tokens - self.vocab_start
        foreign = (local < 0) | (local >= weight.shape[0])
        found = F.embedding(local.masked_fill(foreign, 0), weight)
        return self.leave(found.masked_fill(foreign[..., None], 0.0))

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _VocabParallelLoss.apply(widened(logits), targets, self.vocab_start, self.group)


class SequenceSeams(TensorSeams):
    """Between the blocks each rank has its part of the positions: [batch, seq / tp, hidden]."""

    def __init__(self, spec: ModelSpec, vocab_size: int, mesh: DeviceMesh) -> None:
        super().__init__(spec, vocab_size, mesh)
        self.sharers, self.rank = mesh.size(), mesh.get_local_rank()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return _Gather.apply(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return _Scatter.apply(x, self.group)

    def first_position(self, count: int) -> int:
        return self.rank * count

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        return _SumOut.apply(x, self.group)


class _CopyIn(torch.autograd.Function):
    """The same on every rank going in; gradients are summed coming back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradient, ctx.group), None


class _SumOut(torch.autograd.Function):
    """Partial sums going in, their sum coming out; the gradient is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """All positions from each rank's part; gradients are summed and split again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scattered(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    """Partial sums of all positions going in, the sum of this rank's positions coming out."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(gradient, ctx.group), None


class _VocabParallelLoss(torch.autograd.Function):
    """Cross-entropy over logits split by vocabulary: three all-reduces of one number a token, never the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, start: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        local, counted = targets - start, targets != IGNORED
        foreign = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(foreign, 0)
        highest = logits.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        shifted = logits - highest[..., None]
        own = shifted.gather(-1, local[..., None])[..., 0].masked_fill(foreign, 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(-1), own))
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials.div_(sums[0][..., None]), local, foreign, counted)
        return ((sums[0].log() - sums[1]) * counted).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities, local, foreign, counted = ctx.saved_tensors
        result = probabilities.clone()
        result.scatter_add_(-1, local[..., None], foreign.to(result.dtype)[..., None] - 1.0)
        return result.mul_(gradient * counted[..., None]), None, None, None


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[batch, seq / tp, ...] of each rank -> [batch, seq, ...]."""
    first = x.transpose(0, 1).contiguous()
    whole = first.new_empty(first.shape[0] * group.size(), *first.shape[1:])
    dist.all_gather_single(whole, first, group=group)
    return whole.transpose(0, 1).contiguous()


def _scattered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[batch, seq, ...] of each rank -> [batch, seq / tp, ...], summed."""
    first = x.transpose(0, 1).contiguous()
    part = first.new_empty(first.shape[0] // group.size(), *first.shape[1:])
    dist.reduce_scatter_single(part, first, group=group)
    return part.transpose(0, 1).contiguous()  # it may be sent to another stage
