"""Small parts that every block is made of: matrices, norms, rotary positions, dropout. They know no meshes.

Sources: RMSNorm (arXiv 1910.07467), layer normalisation (1607.06450), RoFormer (2104.09864), dropout (1207.0580).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from workers.models.samples import Samples
from workers.models.seams import Seams, widened

Rows = Callable[[torch.Tensor], torch.Tensor]


class Matrix(nn.Module):
    """A weight [out, in] and perhaps a bias [out]."""

    def __init__(self, out_features: int, in_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.scale: float | None = None  # of what an adapter adds

    def adapt(self, rank: int, scale: float) -> None:
        """From now on it has a low-rank adapter: A [rank, in] and B [out, rank]."""
        out_features, in_features = self.weight.shape
        self.scale = scale
        self.lora_a = nn.Parameter(self.weight.new_empty(rank, in_features))
        self.lora_b = nn.Parameter(self.weight.new_empty(out_features, rank))

    def forward(self, x: torch.Tensor, rows: Rows = lambda whole: whole) -> torch.Tensor:
        """[..., in] -> [..., those of out that `rows` takes]."""
        return self.product(x, None if self.bias is None else rows(self.bias), rows)

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, rows: Rows = lambda whole: whole
    ) -> torch.Tensor:
        """Without the bias, or with another one."""
        y = F.linear(x, rows(self.weight), bias)
        if self.scale is None:
            return y
        return y + self.scale * F.linear(F.linear(x, self.lora_a), rows(self.lora_b))


class Norm(nn.Module):
    """Over the last dimension: its root mean square to 1 and, as `layer`, its mean to 0 first and a bias after."""

    def __init__(self, size: int, eps: float, layer: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if layer else None
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary(nn.Module):
    """Rotates pairs (i, i + size/2) of a vector by position * theta^(-2i/size)."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, size: int, seq_len: int, theta: float, dtype: torch.dtype) -> None:
        super().__init__()
        half = torch.arange(0, size, 2, dtype=torch.float64) / size
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), theta**-half)
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """x [batch, seq, heads, size], rotated; the same shape and dtype. `positions` [batch, seq], or 0, 1, ..."""
        at = slice(x.shape[1]) if positions is None else positions
        cos, sin = self.cos[at].unsqueeze(-2), self.sin[at].unsqueeze(-2)
        low, high = widened(x).chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class Dropout(nn.Module):
    """Zeroes elements with probability `p` while training, and scales the others by 1 / (1 - p).

    Whether an element is kept is a hash of (seed, site, sample, position, feature): equal in any layout, at any retry
    and when it is computed again; no generator has a state to be saved.
    """

    def __init__(self, p: float, site: str, seams: Seams) -> None:
        super().__init__()
        self.p, self.seams = p, seams
        self.key = int.from_bytes(hashlib.sha256(site.encode()).digest()[:4], "little")

    def forward(self, x: torch.Tensor, samples: Samples) -> torch.Tensor:
        """x [batch, seq or this rank's part of it, hidden]."""
        if not self.training or self.p == 0.0:
            return x
        first = self.seams.first_position(x.shape[1])
        at = torch.arange(first, first + x.shape[1], device=x.device)[:, None] * x.shape[-1]
        at = at + torch.arange(x.shape[-1], device=x.device)
        sample = mixed(samples.numbers ^ (self.key ^ self.seams.seed) & WORD)
        kept = mixed(mixed(at & WORD) ^ sample[:, None, None]) >= int(self.p * 2**32)
        return x * kept / (1.0 - self.p)


WORD = 0xFFFF_FFFF


def mixed(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit words, held in int64, after which each bit depends on all (Wellons' lowbias32)."""
    x = (x & WORD) ^ (x & WORD) >> 16
    x = x * 0x7FEB_352D & WORD
    x = x ^ x >> 15
    x = x * 0x846C_A68B & WORD
    return x ^ x >> 16
