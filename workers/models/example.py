"""A model of one's own: attention and feed-forward side by side, as in PaLM (arXiv 2204.02311), with one norm a block.

    model: {family: "workers.models.example:ParallelDecoder", layers: 4, hidden: 64, heads: 4, seq_len: 128}

Copy this file into a package that every node has, and change what is between `enter` and `leave`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from workers.models.attention import Attention
from workers.models.decoder import Decoder, FeedForward
from workers.models.parts import Norm, Rotary
from workers.models.samples import Samples
from workers.models.seams import Seams
from workers.models.sharding import Rules
from workers.models.spec import ModelSpec


class ParallelBlock(nn.Module):
    def __init__(self, spec: ModelSpec, number: int, rotary: Rotary | None, seams: Seams) -> None:
        super().__init__()
        self.seams = seams
        self.norm = Norm(spec.hidden, spec.norm_eps)
        self.attention = Attention(spec, rotary, seams)
        self.ffn = FeedForward(spec, spec.ffn_hidden)

    def forward(self, x: torch.Tensor, samples: Samples) -> torch.Tensor:
        entered = self.seams.enter(self.norm(x))  # from here on, each rank has its heads and features
        return x + self.seams.leave(self.attention(entered, samples) + self.ffn(entered))  # one sum of both


class ParallelDecoder(Decoder):
    SHARDING: ClassVar[Rules] = {
        "wq.weight": ("tp", 0), "wk.weight": ("tp", 0), "wv.weight": ("tp", 0), "wo.weight": ("tp", 1),
        "gate.weight": ("tp", 0), "up.weight": ("tp", 0), "down.weight": ("tp", 1),
        "embedding.weight": ("tp", 0), "head.weight": ("tp", 0),
    }  # fmt: skip

    def block(self, *parts: Any) -> nn.Module:
        return ParallelBlock(*parts)
