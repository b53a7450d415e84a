"""Self-attention: grouped queries (arXiv 2305.13245), and multi-head latent attention (2405.04434).

x [batch, seq, hidden] -> this rank's contribution to [batch, seq, hidden], without the bias of the last projection,
which is added once after the contributions have been summed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from workers.models.parts import Matrix, Norm, Rotary
from workers.models.samples import Samples
from workers.models.seams import Seams
from workers.models.spec import LatentSpec, ModelSpec


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, rotary: Rotary | None, seams: Seams) -> None:
        super().__init__()
        self.head_dim, self.rotary, self.seams = spec.head_dim, rotary, seams
        biased = spec.bias != "none"
        self.wq = Matrix(spec.heads * spec.head_dim, spec.hidden, biased)
        self.wk = Matrix(spec.kv_heads * spec.head_dim, spec.hidden, biased)
        self.wv = Matrix(spec.kv_heads * spec.head_dim, spec.hidden, biased)
        self.wo = Matrix(spec.hidden, spec.heads * spec.head_dim, spec.bias == "all")
        self.q_norm = Norm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = Norm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None

    def forward(self, x: torch.Tensor, samples: Samples) -> torch.Tensor:
        kv, positions = self.seams.kv, samples.positions()
        query, key, value = map(self._heads, (self.wq(x), self.wk(x, kv), self.wv(x, kv)))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        return self.wo.product(attended(query, key, value, samples.mask()))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class LatentAttention(nn.Module):
    """Queries, keys and values are made from latent vectors; a part of each head, shared by the keys, has positions."""

    def __init__(self, spec: ModelSpec, latent: LatentSpec, rotary: Rotary, seams: Seams) -> None:
        super().__init__()
        self.latent, self.rotary, self.seams = latent, rotary, seams
        size = latent.plain + latent.rotary
        self.wq_down = Matrix(latent.query, spec.hidden) if latent.query else None
        self.q_norm = Norm(latent.query, spec.norm_eps) if latent.query else None
        self.wq = Matrix(spec.heads * size, latent.query or spec.hidden)
        self.wkv_down = Matrix(latent.key_value + latent.rotary, spec.hidden)
        self.kv_norm = Norm(latent.key_value, spec.norm_eps)
        self.wkv = Matrix(spec.heads * (latent.plain + latent.value), latent.key_value)
        self.wo = Matrix(spec.hidden, spec.heads * latent.value)

    def forward(self, x: torch.Tensor, samples: Samples) -> torch.Tensor:
        sizes, positions = self.latent, samples.positions()
        queries = x
        if self.wq_down is not None and self.q_norm is not None:
            queries = self.q_norm(self.wq_down(x))
        query = self.wq(queries).unflatten(-1, (-1, sizes.plain + sizes.rotary))
        small, rotary = self.wkv_down(x).split((sizes.key_value, sizes.rotary), -1)
        both = self.wkv(self.kv_norm(small)).unflatten(-1, (-1, sizes.plain + sizes.value))
        key, value = both.split((sizes.plain, sizes.value), -1)
        plain, turning = query.split((sizes.plain, sizes.rotary), -1)
        turned = self.rotary(rotary[:, :, None], positions).expand(-1, -1, key.shape[2], -1)
        query = torch.cat((plain, self.rotary(turning, positions)), -1)
        mixed = attended(query, torch.cat((key, turned), -1), value, samples.mask())
        return self.wo.product(mixed)


def attention(spec: ModelSpec, rotary: Rotary | None, seams: Seams) -> nn.Module:
    """The kind that the spec asks for."""
    if spec.latent is None:
        return Attention(spec, rotary, seams)
    assert rotary is not None
    return LatentAttention(spec, spec.latent, rotary, seams)


def attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal, or as `mask` says, of [batch, seq, heads, size]; key and value heads may be fewer -> [batch, seq, heads *
    size]."""
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return mixed.transpose(1, 2).flatten(2)
