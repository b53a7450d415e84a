"""A decoder-only transformer, plain and on a single device: Llama and its kin, GPT, mixtures of experts.

Knows nothing of meshes: parallelism is applied from outside through its `Seams`. A pipeline stage is the same class
with fewer layers, and with or without the embedding and the head.
Sources: Llama 2 (arXiv 2307.09288), GLU variants (2002.05202), GPT-3 (2005.14165).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from workers.models.attention import attention
from workers.models.moe import MixtureOfExperts
from workers.models.parts import Dropout, Matrix, Norm, Rotary
from workers.models.samples import Samples
from workers.models.seams import Seams
from workers.models.sharding import Rules
from workers.models.spec import ModelSpec


class FeedForward(nn.Module):
    """SwiGLU, or GELU without a gate; without the bias of the last projection, as attention."""

    def __init__(self, spec: ModelSpec, inner: int) -> None:
        super().__init__()
        biased = spec.bias == "all"
        self.gate = Matrix(inner, spec.hidden, biased) if spec.activation == "swiglu" else None
        self.up = Matrix(inner, spec.hidden, biased)
        self.down = Matrix(spec.hidden, inner, biased)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        inner = F.gelu(inner) if self.gate is None else F.silu(self.gate(x)) * inner
        return self.down.product(inner)


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, number: int, rotary: Rotary | None, seams: Seams) -> None:
        super().__init__()
        self.seams, layer = seams, spec.norm == "layer"
        self.attention_norm = Norm(spec.hidden, spec.norm_eps, layer)
        self.attention = attention(spec, rotary, seams)
        self.attention_dropout = Dropout(spec.dropout, f"{number}.attention", seams)
        self.ffn_norm = Norm(spec.hidden, spec.norm_eps, layer)
        experts = spec.experts if spec.has_experts(number) else None
        self.moe = MixtureOfExperts(experts, spec.hidden, seams) if experts else None
        inner = experts.shared if experts else spec.ffn_hidden
        self.ffn = FeedForward(spec, inner) if inner else None
        self.ffn_dropout = Dropout(spec.dropout, f"{number}.ffn", seams)

    def forward(self, x: torch.Tensor, samples: Samples) -> torch.Tensor:
        """x [batch, positions, hidden] -> as x."""
        added = self._left(self.attention(self.seams.enter(self.attention_norm(x)), samples), self.attention.wo)
        x = x + self.attention_dropout(added, samples)
        normed = self.ffn_norm(x)
        added = self.moe(normed, samples) if self.moe is not None else None
        if self.ffn is not None:
            dense = self._left(self.ffn(self.seams.enter(normed)), self.ffn.down)
            added = dense if added is None else added + dense
        return x + self.ffn_dropout(added, samples)

    def _left(self, x: torch.Tensor, last: Matrix) -> torch.Tensor:
        """A sub-layer's result from the ranks' contributions; the bias of its last projection counts once."""
        total = self.seams.leave(x)
        return total if last.bias is None else total + last.bias


class Decoder(nn.Module):
    """All layers, or the ones of a pipeline stage under their global numbers.

    tokens [batch, seq] or, on a later stage, hidden [batch, positions, hidden] -> hidden or, on the last stage, this
    rank's part of the logits [batch, seq, vocabulary].
    """

    SHARDING: ClassVar[Rules] = {
        "wq.weight": ("tp", 0), "wk.weight": ("tp", 0), "wv.weight": ("tp", 0), "wkv.weight": ("tp", 0),
        "wq.bias": ("tp", 0), "wk.bias": ("tp", 0), "wv.bias": ("tp", 0), "wo.weight": ("tp", 1),
        "gate.weight": ("tp", 0), "up.weight": ("tp", 0), "gate.bias": ("tp", 0), "up.bias": ("tp", 0),
        "down.weight": ("tp", 1), "embedding.weight": ("tp", 0), "head.weight": ("tp", 0),
        "q_norm.weight": ("tp", None), "k_norm.weight": ("tp", None), "kv_norm.weight": ("tp", None),
        "wq_down.weight": ("tp", None), "wkv_down.weight": ("tp", None),
        "experts.gate": ("ep", 0), "experts.up": ("ep", 0), "experts.down": ("ep", 0),
    }  # fmt: skip

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
        rotary = _rotary(spec, dtype)
        numbers = range(spec.layers) if layers is None else layers
        self.first, self.tied = first, spec.tied_embedding
        self.embedding = Matrix(vocab_size, spec.hidden) if first or (last and self.tied) else None
        learned = first and spec.positions == "learned"
        self.positions = Matrix(spec.seq_len, spec.hidden) if learned else None
        self.dropout = Dropout(spec.dropout, "embedding", self.seams) if first else None
        self.layers = nn.ModuleDict({str(number): self.block(spec, number, rotary, self.seams) for number in numbers})
        self.norm = Norm(spec.hidden, spec.norm_eps, spec.norm == "layer") if last else None
        self.head = Matrix(vocab_size, spec.hidden) if last and not self.tied else None
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)

    def block(self, *parts: Any) -> nn.Module:
        """One layer, of (spec, its number, rotary positions, seams)."""
        return Block(*parts)

    def forward(self, x: torch.Tensor, samples: Samples | None = None) -> torch.Tensor:
        """`samples`: by default each is one document, and its number its place in `x`."""
        if samples is None:
            samples = Samples(torch.arange(len(x), device=x.device))
        if self.embedding is not None and self.dropout is not None:
            x = self.dropout(self._embedded(x, self.embedding, samples), samples)
        for block in self.layers.values():
            x = block(x, samples)
        if self.norm is not None:
            head = self.embedding if self.tied else self.head
            x = F.linear(self.seams.enter(self.norm(x)), head.weight)
        return x

    def _embedded(self, tokens: torch.Tensor, embedding: Matrix, samples: Samples) -> torch.Tensor:
        x = self.seams.embed(tokens, embedding.weight)
        if self.positions is None:
            return x
        first = self.seams.first_position(x.shape[1])
        here, own = slice(first, first + x.shape[1]), samples.positions()
        return x + (self.positions.weight[here] if own is None else F.embedding(own[:, here], self.positions.weight))


def _rotary(spec: ModelSpec, dtype: torch.dtype) -> Rotary | None:
    if spec.positions != "rotary":
        return None
    size = spec.latent.rotary if spec.latent else spec.head_dim
    return Rotary(size, spec.seq_len, spec.rope_theta, torch.float64 if dtype == torch.float64 else torch.float32)


@torch.no_grad()
def initialise(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fill every parameter from a generator seeded by (seed, logical name): equal in any layout and on any mesh.

    Norms are ones, biases zeros; matrices normal with init_std, those that write to the residual stream scaled by
    1/sqrt(2 layers); of adapters A uniform by its inputs, and B zeros.
    """
    for name, parameter in model.named_parameters():
        parameter.copy_(initial(name, parameter.shape, spec, seed))


def initial(name: str, shape: torch.Size, spec: ModelSpec, seed: int) -> torch.Tensor:
    """The whole initial value, float64, of the parameter called `name`."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.float64)
    if name.endswith((".bias", ".lora_b")):
        return torch.zeros(shape, dtype=torch.float64)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if name.endswith(".lora_a"):
        return (torch.rand(shape, dtype=torch.float64, generator=generator) * 2 - 1) / shape[1] ** 0.5
    residual = name.endswith(("wo.weight", "ffn.down.weight", "experts.down"))
    std = spec.init_std / (2 * spec.layers) ** 0.5 if residual else spec.init_std
    return torch.randn(shape, dtype=torch.float64, generator=generator) * std
