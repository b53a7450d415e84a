"""A software stack: what its kernels and its communication reach on a GPU. Knows neither models nor layouts.

Two kinds of numbers. `Rates` are the few constants that are fitted on published runs (`tests/bench/planner_fit.py`),
each held to a prior by its spread; they are shares of a data sheet's number, or seconds. `Stack` says what a program
does: which attention, what it overlaps, what it keeps in memory; those are read off its code and papers, not fitted.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from service.core.plan import fitted

Kind = Literal["nvidia-smi", "allocator"]


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Shares of a data sheet's number, or seconds. Priors: what micro-benchmarks and the sources beside them show."""

    gemm_ampere: float = 0.80  # of peak, in products that fill their waves: arXiv 2205.05198, table 4 (a layer's time)
    gemm_hopper: float = 0.68  # 0.80 in short runs (XLA's table of products); 700 W parts slow down under load
    gemm_hopper_500w: float = 0.57  # 500 W parts more so: about the root of the power
    gemm_blackwell: float = 0.56  # 2.3 times Hopper's peak at 1.4 to 1.7 times its power
    flash_ampere: float = 0.50  # of peak, half of the scores counted: FlashAttention-2 (2307.08691) reaches 0.5 to 0.7
    flash_hopper: float = 0.50  # 553 forward and 422 backward TFLOP/s of 989: Megatron-Core MoE report, table 9
    flash_blackwell: float = 0.50  # 1324 and 1083 of 2450: the same
    memory: float = 0.80  # of a GPU memory's bandwidth
    scores: float = 1.0  # traffic of unfused attention over a count of its passes
    nvlink: float = 0.75  # of a link's one direction, in large collectives
    nic: float = 0.80
    launch_s: float = 12e-6  # the host's time for a kernel
    ramp: float = 0.1  # waves of tiles that a product loses beside what its last one leaves empty
    unaligned: float = 0.05  # of peak, in attention with a head size that 8 doesn't divide: no tensor cores


PRIOR = Rates()

SPREAD = Rates(
    gemm_ampere=0.05, gemm_hopper=0.05, gemm_hopper_500w=0.08, gemm_blackwell=0.12, flash_ampere=0.25, flash_hopper=0.2,
    flash_blackwell=0.25, memory=0.12, scores=0.3, nvlink=0.12, nic=0.15, launch_s=0.3, ramp=0.3, unaligned=0.4,
)  # fmt: skip
"""Standard deviations of the logarithms of the priors: of how far other programs and years may be from them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    name: str
    year: int
    why: str
    flash: bool = True  # attention that keeps no scores
    gemm: float = 1.0  # of what the rates say
    traffic: float = 1.0  # memory traffic of norms, activations and sums over that of fused kernels
    kernels: float = 1.0  # launches over those of fused kernels
    blocking: bool = False  # the host waits for each kernel
    tp_hidden: tuple[float, float] = (0.0, 0.0)  # share of tp traffic behind products, forward and backward
    dp_hidden: float = 0.0  # share of a backward pass that gradient traffic can hide behind
    pp_hidden: float = 0.0  # share of the traffic between stages
    cp_hidden: float = 0.7
    scatter_gather: bool = True  # tp ranks send a stage's output once, not each all of it
    weight_bytes: int = 2  # a parameter's copy for products
    gradient_bytes: int = 4
    reduce_bytes: int = 4  # of a gradient on the wire
    optimizer_bytes: int = 12  # fp32 copy and two moments
    sharded_weights: bool = False  # fp32 parameters are in shards, gathered for products
    accumulate_bytes: int = 8  # memory traffic of adding a parameter's gradient up
    logit_bytes: int = 6  # kept of a logit
    loss_traffic: int = 30  # bytes moved for a logit, forward and backward; 58 where the loss is not fused
    step_s: float = 0.01  # of a step on the host: loading, logging, the loss read back
    reserve_gb: float = 5.0  # context, allocator, communicators: what nvidia-smi shows above the tensors
    peak_gb: float = 1.0  # buffers that the allocator counts too
    scale: float = 1.0  # of all seconds: what a short probe measured over what was estimated
    rates: Rates = PRIOR

    def rate(self, kind: str, family: str) -> float:
        """`gemm` or `flash` of a family of GPUs, a share of peak."""
        known = {"volta": "ampere", "cpu": "ampere", "hopper-500w": "hopper_500w"}.get(family, family)
        if kind == "flash":
            known = known.replace("_500w", "")
        value: float = getattr(self.rates, f"{kind}_{known}")
        return value * (self.gemm if kind == "gemm" else 1.0)


STACKS = {
    stack.name: stack
    for stack in (
        Stack("phalanx", 2026, "torch eager blocks, FSDP2, gradients summed in fp32 until one reduction a step",
              traffic=1.6, kernels=2.0, dp_hidden=0.5, scatter_gather=False, sharded_weights=True, loss_traffic=58,
              logit_bytes=10),
        Stack("phalanx-compiled", 2026, "as phalanx, each block compiled",
              dp_hidden=0.5, scatter_gather=False, sharded_weights=True, loss_traffic=58, logit_bytes=10),
        Stack("megatron-2021", 2021, "arXiv 2104.04473: fused softmax, nothing overlapped, gradients of fp16",
              flash=False, gradient_bytes=2, reduce_bytes=2, loss_traffic=58),
        Stack("megatron-2022", 2022, "arXiv 2205.05198: backward all-reduces of tp behind products",
              flash=False, tp_hidden=(0.0, 0.5), accumulate_bytes=4, loss_traffic=58),
        Stack("megatron-deepspeed-2022", 2022, "ZeRO-1, 1F1B without scatter-gather, eager",
              flash=False, traffic=1.6, kernels=2.0, scatter_gather=False, gradient_bytes=2, reduce_bytes=2,
              optimizer_bytes=16, loss_traffic=58),
        Stack("megatron-2023", 2023, "Megatron-LM with unfused attention at short sequences", flash=False,
              tp_hidden=(0.0, 0.5), accumulate_bytes=4, loss_traffic=58),
        Stack("megatron-core-2024", 2024, "Transformer Engine, flash attention, overlaps of dp, tp and pp",
              tp_hidden=(0.6, 0.6), dp_hidden=0.8, pp_hidden=0.8, reduce_bytes=2, accumulate_bytes=4, loss_traffic=58),
        Stack("megatron-core-plain", 2025, "Transformer Engine and flash attention, overlaps of tp and pp off",
              tp_hidden=(0.0, 0.5), accumulate_bytes=4),
        Stack("nemo-2025", 2025, "NeMo: Transformer Engine, cuDNN attention, all overlaps, clocks raised",
              gemm=1.03, tp_hidden=(0.7, 0.7), dp_hidden=0.8, pp_hidden=0.8, reduce_bytes=2, gradient_bytes=2,
              accumulate_bytes=4),
        Stack("torchtitan-2024", 2024, "FSDP2 and DTensor tp, compiled blocks", tp_hidden=(0.0, 0.0), dp_hidden=0.8,
              sharded_weights=True),
        Stack("torchtitan-async", 2025, "as torchtitan, async tp", tp_hidden=(0.5, 0.5), dp_hidden=0.8,
              sharded_weights=True),
        Stack("torchtitan-eager", 2024, "FSDP2 without compile", traffic=1.6, kernels=2.0, dp_hidden=0.8,
              sharded_weights=True),
        Stack("fsdp", 2023, "FSDP, eager", traffic=1.6, kernels=2.0, dp_hidden=0.8, sharded_weights=True),
    )
}  # fmt: skip


def fit(stack: Stack, held_out: str = "") -> Stack:
    """With the fitted rates; with those fitted without a family of sources, where it is named."""
    values = fitted.WITHOUT.get(held_out, fitted.ALL)
    return dataclasses.replace(stack, rates=dataclasses.replace(PRIOR, **values))


def probed(stack: Stack, estimated_s: float, measured_s: float) -> Stack:
    """Calibrated by a short probe on the real machine: one factor for all seconds."""
    return dataclasses.replace(stack, scale=stack.scale * measured_s / estimated_s)


OWN = fit(STACKS["phalanx"])
OWN_COMPILED = fit(STACKS["phalanx-compiled"])
