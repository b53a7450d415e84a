"""A mixture of experts: each token goes to the few experts that a router picks for it. None is dropped.

Balance is kept by a loss of each sequence, so that the cut into micro-batches can't change it, or by biases that shift
the choice alone. Sources: Switch Transformers (arXiv 2101.03961), Mixtral (2401.04088), DeepSeek-V3 (2412.19437).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from workers.models.parts import Matrix
from workers.models.samples import Samples
from workers.models.seams import NOBODY, Exchange, Seams, widened
from workers.models.spec import ExpertSpec


class Router(Matrix):
    """Scores of the experts for each token, and which are chosen."""

    balance: torch.Tensor

    def __init__(self, spec: ExpertSpec, hidden: int) -> None:
        super().__init__(spec.count, hidden)
        self.spec = spec
        self.register_buffer("balance", torch.zeros(spec.count, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] -> scores [tokens, experts]; the chosen experts and their weights [tokens, top_k]."""
        logits = F.linear(widened(x), widened(self.weight))
        scores = logits.softmax(-1) if self.spec.score == "softmax" else logits.sigmoid()
        chosen = self._allowed(scores.detach() + self.balance).topk(self.spec.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.spec.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return scores, chosen, weights * self.spec.scale

    def _allowed(self, scores: torch.Tensor) -> torch.Tensor:
        """-inf outside of the groups whose two best experts sum highest."""
        if self.spec.groups == 1:
            return scores
        grouped = scores.unflatten(-1, (self.spec.groups, -1))
        rank = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        best = rank.topk(self.spec.top_groups, dim=-1).indices
        outside = torch.ones_like(rank, dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)


class Experts(nn.Module):
    """SwiGLU networks side by side: gate and up [experts, inner, hidden], down [experts, hidden, inner]."""

    def __init__(self, spec: ExpertSpec, hidden: int) -> None:
        super().__init__()
        self.exchange = Exchange()
        self.gate = nn.Parameter(torch.empty(spec.count, spec.hidden, hidden))
        self.up = nn.Parameter(torch.empty(spec.count, spec.hidden, hidden))
        self.down = nn.Parameter(torch.empty(spec.count, hidden, spec.hidden))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """rows [any, hidden] sorted by expert, counts [experts] -> the same shape."""
        return self.exchange.run(rows, counts, self._work)

    def _work(self, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """An expert without a row still takes part: its gradient is zero, not missing."""
        weights = zip(self.gate.unbind(0), self.up.unbind(0), self.down.unbind(0), strict=True)
        parts = [
            F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
            for part, (gate, up, down) in zip(rows.split(sizes), weights, strict=True)
        ]
        return torch.cat(parts)


class MixtureOfExperts(nn.Module):
    """Router and experts over the positions that this rank has; counts in `load` what the backward pass has seen."""

    load: torch.Tensor

    def __init__(self, spec: ExpertSpec, hidden: int, seams: Seams) -> None:
        super().__init__()
        self.spec, self.seams = spec, seams
        self.router = Router(spec, hidden)
        self.experts = Experts(spec, hidden)
        self.register_buffer("load", torch.zeros(spec.count, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor, samples: Samples) -> torch.Tensor:
        """x [batch, positions, hidden] -> what the experts add."""
        tokens = x.flatten(0, 1)
        scores, chosen, weights = self.router(tokens)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.spec.count)
        copies = tokens[:, None].expand(-1, self.spec.top_k, -1).flatten(0, 1)
        done = self.experts(copies[order], counts)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        added = (done[back].unflatten(0, (-1, self.spec.top_k)) * weights[..., None].to(done.dtype)).sum(1)
        return self._balanced(added.view_as(x), scores, chosen, samples.numbers)

    def _balanced(
        self, added: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """The same values, with the balance loss and the count of the load behind them."""
        if not self.training or not (self.spec.auxiliary or self.spec.bias_rate):
            return added
        real = numbers != NOBODY
        taken = F.one_hot(chosen.view(len(numbers), -1), self.spec.count).sum(1) * real[:, None]
        loss = scores.new_zeros(())
        if self.spec.auxiliary:
            loss = self._sequence_loss(scores.view(len(numbers), -1, self.spec.count), taken)
        return _Behind.apply(added, loss, self.seams.scale, taken.sum(0), self.load)

    @torch.no_grad()
    def rebalance(self, load: torch.Tensor) -> None:
        """Make experts with less than the mean of `load` [experts], a step's of all ranks, likelier to be chosen."""
        step = torch.sign(load.mean() - load) * self.spec.bias_rate
        self.router.balance += step.to(self.router.balance)

    def _sequence_loss(self, scores: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
        """DeepSeek-V3's equations 17 to 20, times the tokens of a sequence: it is summed like the loss of tokens."""
        shares = (scores / scores.sum(-1, keepdim=True)).sum(1)
        seq = scores.shape[1] * self.seams.sharers
        both = self.seams.summed(torch.stack((taken.to(shares), shares)))
        fractions, probabilities = both[0] * self.spec.count / (self.spec.top_k * seq), both[1] / seq
        return self.spec.auxiliary * seq * (fractions.detach() * probabilities).sum()


class _Behind(torch.autograd.Function):
    """Hands `x` on. The backward pass, which comes once for each micro-batch, also starts that of the loss, times
    `scale`, and counts the load."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, loss: torch.Tensor, scale: float, taken: torch.Tensor, load: torch.Tensor
    ) -> torch.Tensor:
        ctx.scale, ctx.taken, ctx.load = scale, taken, load
        ctx.kind = loss.new_full((), 0.0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        ctx.load.add_(ctx.taken)
        return gradient, ctx.kind + ctx.scale, None, None, None
