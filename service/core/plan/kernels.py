"""Seconds of one device's kernels: matrix products, attention, and what only moves memory. Knows no layouts.

A product's efficiency depends on its shape: tiles are computed in waves over the multiprocessors, the last of
which is seldom full; and it can't be faster than its operands are read.
"""

from __future__ import annotations

import dataclasses
import math

from service.core.plan.hardware import Gpu
from service.core.plan.stack import Stack

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.93), (64, 128, 0.8))
"""Rows, columns, and the rate of a tile over the largest one's: a library takes the fastest."""

START_S = 3e-6  # of a product: its first tiles are read, its last ones written
BACKWARD_FLOPS = 2.5  # of flash attention's backward pass over its forward one: the scores are computed again
FORWARD_PASSES = 13  # bytes moved for a score: written, softmax, dropout and its mask, read
BACKWARD_PASSES = 19


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    gpu: Gpu
    stack: Stack
    peak: float  # FLOP/s that large products reach
    flash: float  # FLOP/s that attention reaches
    bandwidth: float  # bytes/s that kernels reach

    def product_s(self, m: float, n: float, k: float, count: float = 1.0) -> float:
        """[m, k] x [k, n], `count` of them in one kernel."""
        if m <= 0:
            return 0.0
        compute = min(self._tiled_s(m, n, k, count, *tile) for tile in TILES)
        memory = 2 * count * (m * k + k * n + m * n) / self.bandwidth
        return max(compute, memory) + START_S

    def _tiled_s(self, m: float, n: float, k: float, count: float, high: int, wide: int, rate: float) -> float:
        """All waves take as long as full ones."""
        tiles = count * math.ceil(m / high) * math.ceil(n / wide)
        waves = math.ceil(tiles / self.gpu.multiprocessors) + self.stack.rates.ramp
        return 2 * waves * self.gpu.multiprocessors * high * wide * k / (self.peak * rate)

    def move_s(self, bytes_: float) -> float:
        return bytes_ / self.bandwidth

    def attention_s(
        self, samples: float, heads: float, queries: float, keys: float, dims: tuple[int, int]
    ) -> tuple[float, float]:
        """Forward and backward of causal attention; `dims`: of a query's and of a value's head."""
        scores = samples * heads * queries * keys
        if self.stack.flash:
            forward = scores * sum(dims) / self.flash  # 2 FLOPs each, half of the scores
            return forward, BACKWARD_FLOPS * forward
        if dims[0] % 8 or dims[1] % 8:
            one = 2 * scores * sum(dims) / (self.gpu.peak * self.stack.rates.unaligned)
        else:
            one = max(self.product_s(queries, keys, dim, samples * heads) for dim in dims) * 2
        moved = scores / self.bandwidth * self.stack.rates.scores
        return one + FORWARD_PASSES * moved, 2 * one + BACKWARD_PASSES * moved


def device(gpu: Gpu, stack: Stack, precision: str = "bf16") -> Device:
    peak = gpu.peak
    share = stack.rate("gemm", gpu.family)
    if precision == "fp8" and gpu.peak_fp8:
        peak, share = gpu.peak_fp8, share * FP8_SHARE
    elif precision in ("fp32", "float64"):
        peak = gpu.vector / (4 if precision == "fp32" else 8)
    reached = gpu.reached
    return Device(
        gpu,
        stack,
        peak=peak * share * reached.products,
        flash=gpu.peak * stack.rate("flash", gpu.family) * reached.attention,
        bandwidth=gpu.bandwidth * stack.rates.memory * reached.memory,
    )


FP8_SHARE = 0.75
"""Of a product's efficiency in fp8, casts included, over that in 16 bits. A prior: fp8 runs are fitted nowhere."""
