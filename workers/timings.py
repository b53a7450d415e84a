"""What a short probe of a machine timed: seconds of kernels and collectives by their sizes. Pure: no torch.

It holds what was timed and no rates, so that whoever reads it judges it by a model of today.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workers.models.spec import Spec

Count = Annotated[int, Field(gt=0, le=10**15)]
Seconds = Annotated[float, Field(gt=0, le=3600)]
Precision = Literal["bf16", "fp16", "fp32", "float64"]


class Product(Spec):
    """[m, k] x [k, n]."""

    precision: Precision
    m: Count
    n: Count
    k: Count
    seconds: Seconds

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


class Attention(Spec):
    """Causal, of `tokens` queries and as many keys, forward and backward."""

    precision: Precision
    samples: Count
    heads: Count
    tokens: Count
    dim: Count = Field(description="of a head")
    seconds: Seconds


class Copy(Spec):
    """In a device's own memory; `bytes` are read, and as many written."""

    bytes: Count
    seconds: Seconds


class AllReduce(Spec):
    """Of `bytes` on each of `ranks` on one machine."""

    ranks: int = Field(gt=1, le=1024)
    bytes: Count
    seconds: Seconds


class Probe(Spec):
    version: Literal[1] = 1
    device: str = Field(min_length=1, max_length=200, description="cpu, or a GPU's name as CUDA gives it")
    memory: float = Field(gt=0, description="bytes that one rank can have")
    products: tuple[Product, ...] = Field(min_length=1)
    attention: tuple[Attention, ...] = Field(min_length=1)
    copies: tuple[Copy, ...] = Field(min_length=1)
    all_reduces: tuple[AllReduce, ...] = Field(default=(), description="none where there is but one device")
