"""A decoder of the Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Plain, single device.

Knows nothing of meshes: parallelism is applied from outside through its `Seams`. A pipeline stage is the same class
with fewer layers, and with or without the embedding and the head.
Sources: Llama 2 (arXiv 2307.09288), RoFormer (2104.09864), GQA (2305.13245), GLU variants (2002.05202).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from workers.models.seams import Seams
from workers.spec import ModelSpec


def widened(x: torch.Tensor) -> torch.Tensor:
    """In at least float32: where half precision loses too much."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, seams: Seams) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.seams = eps, seams

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = widened(x)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.seams.whole(self.weight)


class Matrix(nn.Module):
    """A weight [out, in] without a bias; who multiplies by it decides which part of it is used."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))


class Rotary(nn.Module):
    """Rotates pairs (i, i + head_dim/2) of each head by position * theta^(-2i/head_dim)."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        half = torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim
        angles = torch.outer(torch.arange(spec.seq_len, dtype=torch.float64), spec.rope_theta**-half)
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, seq, heads, head_dim], rotated; the same shape and dtype."""
        seq = x.shape[1]
        cos, sin = self.cos[:seq, None], self.sin[:seq, None]
        low, high = widened(x).chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, rotary: Rotary, seams: Seams) -> None:
        super().__init__()
        self.head_dim, self.rotary, self.seams = spec.head_dim, rotary, seams
        self.wq = Matrix(spec.heads * spec.head_dim, spec.hidden)
        self.wk = Matrix(spec.kv_heads * spec.head_dim, spec.hidden)
        self.wv = Matrix(spec.kv_heads * spec.head_dim, spec.hidden)
        self.wo = Matrix(spec.hidden, spec.heads * spec.head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, seq, hidden] -> this rank's contribution to [batch, seq, hidden]."""
        query = self._heads(x, self.seams.split(self.wq.weight))
        key = self._heads(x, self.seams.kv(self.wk.weight))
        value = self._heads(x, self.seams.kv(self.wv.weight))
        mixed = F.scaled_dot_product_attention(
            self.rotary(query).transpose(1, 2),
            self.rotary(key).transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return F.linear(mixed.transpose(1, 2).flatten(2), self.seams.split(self.wo.weight))

    def _heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight).unflatten(-1, (-1, self.head_dim))


class FeedForward(nn.Module):
    def __init__(self, spec: ModelSpec, seams: Seams) -> None:
        super().__init__()
        self.seams = seams
        self.gate = Matrix(spec.ffn_hidden, spec.hidden)
        self.up = Matrix(spec.ffn_hidden, spec.hidden)
        self.down = Matrix(spec.hidden, spec.ffn_hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.seams.split
        inner = F.silu(F.linear(x, split(self.gate.weight))) * F.linear(x, split(self.up.weight))
        return F.linear(inner, split(self.down.weight))


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, rotary: Rotary, seams: Seams) -> None:
        super().__init__()
        self.seams = seams
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps, seams)
        self.attention = Attention(spec, rotary, seams)
        self.ffn_norm = RMSNorm(spec.hidden, spec.norm_eps, seams)
        self.ffn = FeedForward(spec, seams)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        enter, leave = self.seams.enter, self.seams.leave
        x = x + leave(self.attention(enter(self.attention_norm(x))))
        return x + leave(self.ffn(enter(self.ffn_norm(x))))


class Decoder(nn.Module):
    """All layers, or the ones of a pipeline stage under their global numbers.

    tokens [batch, seq] or, on a later stage, hidden [batch, seq, hidden] -> hidden or, on the last stage, this rank's
    part of the logits [batch, seq, vocabulary].
    """

    def __init__(
        self,
        spec: ModelSpec,
        vocab_size: int,
        *,
        layers: Sequence[int] | None = None,
        first: bool = True,
        last: bool = True,
        seams: Seams | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.seams = seams or Seams()
        rotary = Rotary(spec, torch.float64 if dtype == torch.float64 else torch.float32)
        numbers = range(spec.layers) if layers is None else layers
        self.first, self.tied = first, spec.tied_embedding
        self.embedding = Matrix(vocab_size, spec.hidden) if first or (last and self.tied) else None
        self.layers = nn.ModuleDict({str(number): Block(spec, rotary, self.seams) for number in numbers})
        self.norm = RMSNorm(spec.hidden, spec.norm_eps, self.seams) if last else None
        self.head = Matrix(vocab_size, spec.hidden) if last and not self.tied else None
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None and self.first:
            x = self.seams.embed(x, self.embedding.weight)
        for block in self.layers.values():
            x = block(x)
        if self.norm is not None:
            head = self.embedding if self.tied else self.head
            x = F.linear(self.seams.enter(self.norm(x)), self.seams.split(head.weight))
        return x


@torch.no_grad()
def initialise(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fill every parameter from a generator seeded by (seed, logical name): equal in any layout and on any mesh.

    Norms are ones; matrices normal with init_std, those that write to the residual stream scaled by 1/sqrt(2 layers).
    """
    for name, parameter in model.named_parameters():
        parameter.copy_(initial(name, parameter.shape, spec, seed))


def initial(name: str, shape: torch.Size, spec: ModelSpec, seed: int) -> torch.Tensor:
    """The whole initial value, float64, of the parameter called `name`."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.float64)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    residual = name.endswith(("wo.weight", "down.weight"))
    std = spec.init_std / (2 * spec.layers) ** 0.5 if residual else spec.init_std
    return torch.randn(shape, dtype=torch.float64, generator=generator) * std
