"""What a good engineer writes by hand for one model and one layout: the same Llama, split and sharded by torch alone.

Nothing of `workers` but the spec's sizes. Heads, features and vocabulary over tp by four collectives a layer, FSDP2
over dp with one reduction a step, 1F1B over pp, AdamW, the gradient clipped by its global norm: no names, no state to
save, no layout but the one it was written for. Key and value heads are divisible by tp.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from workers.spec import ModelSpec, RunSpec


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Tp:
    """The group of one rank; without one it is a single device's."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.size, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else CopyIn.apply(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else SumOut.apply(x, self.group)


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, tp: Tp, cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().__init__()
        self.tp, self.head_dim, self.cos, self.sin = tp, spec.head_dim, cos, sin
        queries, keys = spec.hidden // tp.size, spec.kv_heads * spec.head_dim // tp.size
        self.attention_norm = nn.RMSNorm(spec.hidden, spec.norm_eps)
        self.wq = nn.Linear(spec.hidden, queries, bias=False)
        self.wk = nn.Linear(spec.hidden, keys, bias=False)
        self.wv = nn.Linear(spec.hidden, keys, bias=False)
        self.wo = nn.Linear(queries, spec.hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(spec.hidden, spec.norm_eps)
        self.gate = nn.Linear(spec.hidden, spec.ffn_hidden // tp.size, bias=False)
        self.up = nn.Linear(spec.hidden, spec.ffn_hidden // tp.size, bias=False)
        self.down = nn.Linear(spec.ffn_hidden // tp.size, spec.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.tp.enter(self.attention_norm(x))
        query, key, value = (
            part(inner).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.wq, self.wk, self.wv)
        )
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(
            self.rotated(query), self.rotated(key), value, is_causal=True, enable_gqa=grouped
        )
        x = x + self.tp.leave(self.wo(mixed.transpose(1, 2).flatten(2)))
        inner = self.tp.enter(self.ffn_norm(x))
        return x + self.tp.leave(self.down(F.silu(self.gate(inner)) * self.up(inner)))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * self.cos - high * self.sin, high * self.cos + low * self.sin), dim=-1)


class Part(nn.Module):
    """A stage: its layers, the embedding on the first, norm and head on the last."""

    def __init__(self, spec: ModelSpec, vocabulary: int, tp: Tp, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.tp, self.rows = tp, vocabulary // tp.size
        half = spec.rope_theta ** -(torch.arange(0, spec.head_dim, 2) / spec.head_dim)
        angles = torch.outer(torch.arange(spec.seq_len), half)
        self.embedding = nn.Embedding(self.rows, spec.hidden) if first else None
        self.layers = nn.ModuleDict({str(layer): Block(spec, tp, angles.cos(), angles.sin()) for layer in layers})
        self.norm = nn.RMSNorm(spec.hidden, spec.norm_eps) if last else None
        self.head = nn.Linear(spec.hidden, self.rows, bias=False) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embed(x)
        for block in self.layers.values():
            x = block(x)
        return x if self.head is None else self.head(self.tp.enter(self.norm(x)))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return self.embedding(tokens)
        local = tokens - self.tp.rank * self.rows
        foreign = (local < 0) | (local >= self.rows)
        return self.tp.leave(self.embedding(local.masked_fill(foreign, 0)) * ~foreign[..., None])

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Summed over tokens."""
        logits, targets = logits.flatten(0, 1), targets.flatten()
        if self.tp.size == 1:
            return F.cross_entropy(logits, targets, reduction="sum")
        highest = logits.detach().amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, self.tp.group)
        local = targets - self.tp.rank * self.rows
        foreign = (local < 0) | (local >= self.rows)
        shifted = logits - highest[:, None]
        own = shifted.gather(-1, local.masked_fill(foreign, 0)[:, None])[:, 0] * ~foreign
        sums = SumOut.apply(torch.stack((shifted.exp().sum(-1), own)), self.tp.group)
        return (sums[0].log() - sums[1]).sum()


class Loop:
    """One rank's model, optimizer and step."""

    def __init__(self, run: RunSpec, vocabulary: int, mesh: DeviceMesh) -> None:
        """`mesh`: axes pp, dp, tp."""
        spec, layout, self.train = run.model, run.parallel, run.train
        stage, each = mesh["pp"].get_local_rank(), spec.layers // layout.pp
        self.first, self.last, self.tp = stage == 0, stage == layout.pp - 1, Tp(mesh["tp"])
        layers = range(stage * each, (stage + 1) * each)
        self.part = Part(spec, vocabulary, self.tp, layers, self.first, self.last)
        self.sharded = layout.dp > 1
        if self.sharded:
            fully_shard(self.part, mesh=mesh["dp"], reshard_after_forward=False)
        self.scale = 1 / (run.train.global_batch * spec.seq_len / layout.dp)  # FSDP2 averages over dp
        self.dp, self.samples = layout.dp, layout.micro_batch
        self.micro_batches = run.train.global_batch // (layout.dp * layout.micro_batch)
        groups = [
            {"params": [p for p in self.part.parameters() if p.ndim > 1], "weight_decay": run.train.weight_decay},
            {"params": [p for p in self.part.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=run.train.learning_rate, betas=run.train.betas, eps=run.train.eps, foreach=True
        )
        self.schedule = None
        if layout.pp > 1:
            hidden = torch.empty(layout.micro_batch, spec.seq_len, spec.hidden, device="meta").requires_grad_()
            tokens = torch.empty(layout.micro_batch, spec.seq_len, dtype=torch.int64, device="meta")
            logits = torch.empty(*tokens.shape, vocabulary // layout.tp, device="meta").requires_grad_()
            inputs, outputs = tokens if self.first else hidden, logits if self.last else hidden
            stage = PipelineStage(
                self.part, stage, layout.pp, torch.device("cpu"),
                input_args=(inputs,), output_args=(outputs,), group=mesh["pp"].get_group(),
            )  # fmt: skip
            self.schedule = Schedule1F1B(stage, self.micro_batches, loss_fn=self.loss, scale_grads=False)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.part.loss(logits, targets) * self.scale

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        """(loss, gradient norm) of the world, from [samples, seq] of this replica."""
        losses = self.staged(tokens, targets) if self.schedule else self.straight(tokens, targets)
        loss, norm = self.agreed(losses)
        if norm > self.train.clip_norm:
            torch._foreach_mul_(self.gradients(), self.train.clip_norm / norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def staged(self, tokens: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if self.first else ()
        if self.last:
            self.schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        else:
            self.schedule.step(*inputs)
        return losses

    def straight(self, tokens: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for index, (inputs, wanted) in enumerate(
            zip(tokens.split(self.samples), targets.split(self.samples), strict=True)
        ):
            if isinstance(self.part, FSDPModule):
                self.part.set_requires_gradient_sync(index == self.micro_batches - 1)
            loss = self.loss(self.part(inputs), wanted)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.to_local() if self.sharded else p.grad for p in self.part.parameters()]

    def agreed(self, losses: list[torch.Tensor]) -> tuple[float, float]:
        """Norms are on every tp rank in full, matrices in parts; loss on every tp rank of the last stage."""
        squares = [gradient.square().sum() for gradient in self.gradients()]
        whole = [square for square, p in zip(squares, self.part.parameters(), strict=True) if p.ndim == 1]
        split = [square for square, p in zip(squares, self.part.parameters(), strict=True) if p.ndim > 1]
        square = sum(split) + (sum(whole) if self.tp.rank == 0 else 0)
        loss = sum(losses) / self.dp if self.tp.rank == 0 and losses else torch.zeros(())
        both = torch.stack((loss, square))
        dist.all_reduce(both)
        return both[0].item(), both[1].item() ** 0.5
