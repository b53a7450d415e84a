"""GPUs as the cost model sees them: what data sheets say, a source a number. No efficiency: that is the stack's, or
what a probe of a real machine reached.

Bandwidths are of one direction and in bytes a second, memory in bytes (10^9 a GB, as vendors count). The link to the
host is PCIe 3, 4 or 5 of 16 lanes, or NVLink-C2C at about what a copy reaches.
"""

from __future__ import annotations

import dataclasses
import re

GB = 1e9


@dataclasses.dataclass(frozen=True, slots=True)
class Reached:
    """What a machine was measured to reach, over what the cost model says of its device: 0.9 is a tenth slower. Of
    products and attention in one precision."""

    products: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    nvlink: float = 1.0
    latency: float = 1.0  # seconds that a collective takes to start, over those estimated


TABLE = Reached()


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One device. `family` names the kernels that it runs: what is fitted is fitted for a family."""

    name: str
    family: str
    peak: float  # dense 16-bit FLOP/s
    peak_fp8: float  # dense FLOP/s, 0 where there is none
    vector: float  # 16-bit FLOP/s without tensor cores
    memory: float  # bytes that a process can have
    bandwidth: float  # bytes/s of its memory
    nvlink: float  # bytes/s to the rest of its NVLink domain, one direction
    nic: float  # bytes/s of its share of the node's network cards, one direction
    host: float  # bytes/s to its node's memory
    node: int  # GPUs of a usual node
    domain: int  # GPUs of an NVLink domain
    multiprocessors: int
    source: str
    reached: Reached = TABLE


def _gpu(
    name: str, family: str, tflops: tuple[float, float, float], memory_gb: float,
    rates: tuple[float, float, float, float], node: int, domain: int, sm: int, source: str,
) -> Gpu:  # fmt: skip
    peak, fp8, vector = (value * 1e12 for value in tflops)
    bandwidth, nvlink, nic, host = (value * GB for value in rates)
    return Gpu(name, family, peak, fp8, vector, memory_gb * GB, bandwidth, nvlink, nic, host, node, domain, sm, source)


GPUS = {
    gpu.name: gpu
    for gpu in (
        # name, family, TFLOP/s (16-bit, fp8, 16-bit without tensor cores), GB,
        # GB/s (memory, NVLink, network card, host), GPUs of a node and of a domain, multiprocessors
        _gpu("V100-SXM-32GB", "volta", (125, 0, 31), 32, (900, 150, 12.5, 12), 8, 8, 80,
             "NVIDIA V100 data sheet; 4 EDR cards a DGX-2 half"),
        _gpu("A100-40GB", "ampere", (312, 0, 78), 40, (1555, 300, 25, 25), 8, 8, 108,
             "NVIDIA A100 data sheet; 200 Gb/s a GPU: llm-foundry's and Selene's nodes"),
        _gpu("A100-80GB", "ampere", (312, 0, 78), 80, (2039, 300, 25, 25), 8, 8, 108,
             "arXiv 2104.04473 section 5, 2205.05198 section 6: eight 200 Gb/s HDR cards a node"),
        _gpu("H100-80GB", "hopper", (989, 1979, 134), 80, (3350, 450, 50, 50), 8, 8, 132,
             "NVIDIA H100 SXM data sheet; 400 Gb/s a GPU"),
        _gpu("H100-96GB-HBM2e-500W", "hopper-500w", (989, 1979, 134), 96, (2400, 450, 50, 50), 8, 8, 132,
             "pytorch/torchtitan benchmarks/llama3_h100_202412: 96 GB HBM2e, 2.4 TB/s, 500 W, 400 Gb/s"),
        _gpu("H800-80GB", "hopper", (989, 1979, 134), 80, (3350, 200, 50, 50), 8, 8, 132,
             "as H100; NVLink of 400 GB/s in both directions and 50 GB/s InfiniBand: arXiv 2412.19437 section 3"),
        _gpu("H200-141GB", "hopper", (989, 1979, 134), 141, (4800, 450, 50, 50), 8, 8, 132,
             "NVIDIA H200 data sheet; 400 Gb/s a GPU"),
        _gpu("B200", "blackwell", (2250, 4500, 296), 180, (8000, 900, 50, 50), 8, 8, 148,
             "NVIDIA B200 data sheet; 180 GB usable and 8 x 400 Gb/s: MLPerf inference v6.0 systems"),
        _gpu("GB200", "blackwell", (2450, 4900, 323), 186, (8000, 900, 50, 200), 4, 72, 148,
             "dgxc-benchmarking v25.05.05; 72 GPUs an NVLink domain in nodes of 4"),
        _gpu("B300", "blackwell", (2250, 4500, 296), 270, (8000, 900, 100, 50), 8, 8, 148,
             "16-bit as B200; 800 Gb/s a GPU"),
        _gpu("GB300", "blackwell", (2450, 4900, 323), 278, (8000, 900, 100, 200), 4, 72, 148,
             "16-bit as GB200; dgxc-benchmarking v25.10.02"),
        _gpu("cpu", "cpu", (0.05, 0, 0.05), 8, (10, 1, 1, 10), 1, 1, 1,
             "a slot of a simulated fleet: an order of magnitude, for layouts to be compared on"),
    )
}  # fmt: skip

ALIASES = (
    # a pattern of names as CUDA and reports give them; the first that fits counts
    (r"GB300", "GB300"),
    (r"GB200", "GB200"),
    (r"B300", "B300"),
    (r"B200", "B200"),
    (r"H200", "H200-141GB"),
    (r"H800", "H800-80GB"),
    (r"H100.*500\s?W", "H100-96GB-HBM2e-500W"),
    (r"H100", "H100-80GB"),
    (r"A100.*40", "A100-40GB"),
    (r"A[18]00", "A100-80GB"),
    (r"V100", "V100-SXM-32GB"),
    (r"^cpu$", "cpu"),
)


def find(name: str) -> Gpu | None:
    """The GPU of that name, or the one that the name is a longer or another name of; None where no figure is known."""
    if name in GPUS:
        return GPUS[name]
    return next((GPUS[known] for pattern, known in ALIASES if re.search(pattern, name, re.IGNORECASE)), None)
