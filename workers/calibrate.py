"""`python -m workers.calibrate --json`: what this machine's device and the links between its ranks reach, in seconds.

Times a layer's matrix products forward and backward at several sizes, causal attention, a copy in the device's memory,
and, where there are several devices, all-reduces among ranks on this machine. Sizes grow until one takes too long, so
that any model is probed in seconds. A CPU is one thread, as a rank has, and its time is what that thread ran: others on
the machine do not count. A GPU is heated first, since its clock falls under load. What it means for a plan is for the
reader.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
import yaml
from pydantic import ValidationError

from workers import trainer
from workers.models.spec import ModelSpec
from workers.parallel.precision import COMPUTE
from workers.timings import AllReduce, Attention, Copy, Precision, Probe, Product

ROUNDS = 3  # of which the median counts
TIMEOUT = datetime.timedelta(seconds=60)  # of ranks that wait for each other
CUTS = (1, 4)  # ranks of tp that a product's weights are cut over
GROWTH = 4  # of tokens from one size to the next

USUAL = {
    "cpu": ModelSpec(layers=1, hidden=512, heads=8, ffn_hidden=1376, seq_len=1024),
    "gpu": ModelSpec(preset="llama3-8b"),
}
"""Models whose shapes are probed where none is named."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """A device, and how large a probe of it may be."""

    device: torch.device
    precisions: tuple[Precision, ...]
    tokens: tuple[int, int]  # fewest and most of a product
    clock: Callable[[], float]
    heat_s: float  # of work before anything counts
    round_s: float  # that a round lasts at least, by repetition
    slow_s: float  # a size that takes so long is the last
    elements: int  # of one tensor at most
    copied: tuple[int, ...]  # bytes
    reduced: tuple[int, ...]

    def median_s(self, run: Callable[[], object]) -> float:
        run()
        first = self.timed_s(run, 1)
        times = min(1000, max(1, int(self.round_s / max(first, 1e-6))))
        return statistics.median(self.timed_s(run, times) for _ in range(ROUNDS))

    def timed_s(self, run: Callable[[], object], times: int) -> float:
        self._wait()
        began = self.clock()
        for _ in range(times):
            run()
        self._wait()
        return (self.clock() - began) / times

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def drawn(self, *shape: int, precision: Precision = "fp32") -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(COMPUTE[precision])


MIB = 2**20
CPU = Bench(
    torch.device("cpu"),
    precisions=("fp32", "bf16"),
    tokens=(64, 4096),
    clock=time.process_time,
    heat_s=0.0,
    round_s=0.005,
    slow_s=0.03,
    elements=2**25,
    copied=(256 * MIB,),
    reduced=(4096, MIB, 16 * MIB),
)
GPU = Bench(
    torch.device("cuda"),
    precisions=("bf16", "fp32"),
    tokens=(512, 32_768),
    clock=time.perf_counter,
    heat_s=3.0,
    round_s=0.05,
    slow_s=0.1,
    elements=2**31,
    copied=(1024 * MIB,),
    reduced=(4096, 16 * MIB, 256 * MIB),
)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    device = options.device or ("gpu" if torch.cuda.is_available() else "cpu")
    if device == "gpu" and not torch.cuda.is_available():
        sys.stderr.write("there is no GPU on this machine\n")
        return 2
    try:
        model = _model(options.job) if options.job else USUAL[device]
    except (ValueError, OSError, yaml.YAMLError) as error:
        sys.stderr.write(f"{options.job}: {_sentence(error)}\n")
        return 2
    trainer.quieten(device)
    found = probed(GPU if device == "gpu" else CPU, model)
    sys.stdout.write(f"{found.model_dump_json(indent=None if options.json else 2)}\n")
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.calibrate", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default gpu where there is one")
    parser.add_argument("--job", type=Path, help="a job as YAML or JSON: shapes of its model")
    parser.add_argument("--json", action="store_true", help="on one line")
    return parser.parse_args(arguments)


def _model(job: Path) -> ModelSpec:
    found = yaml.safe_load(job.read_text())
    if not isinstance(found, dict) or "model" not in found:
        raise ValueError("a job is a mapping of fields that has a model")
    return ModelSpec.model_validate(found["model"])


def _sentence(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    first = error.errors()[0]
    field = ".".join(["model", *map(str, first["loc"])])
    return f"{field}: {first['msg'].removeprefix('Value error, ')}"


def probed(bench: Bench, model: ModelSpec) -> Probe:
    gpu = bench.device.type == "cuda"
    ranks = torch.cuda.device_count() if gpu else min(2, os.cpu_count() or 1)
    memory = psutil.virtual_memory().total / (os.cpu_count() or 1)
    _heat(bench)
    return Probe(
        device=torch.cuda.get_device_name() if gpu else "cpu",
        memory=torch.cuda.get_device_properties(0).total_memory if gpu else memory,
        products=tuple(product for precision in bench.precisions for product in _products(bench, model, precision)),
        attention=tuple(one for precision in bench.precisions for one in _attention(bench, model, precision)),
        copies=tuple(_copy(bench, bytes_) for bytes_ in bench.copied),
        all_reduces=_all_reduces(bench, ranks) if ranks > 1 else (),
    )


def _heat(bench: Bench) -> None:
    square = bench.drawn(4096, 4096, precision="bf16") if bench.heat_s else None
    until = time.monotonic() + bench.heat_s
    while square is not None and time.monotonic() < until:
        bench.timed_s(lambda: square @ square, 100)


def _products(bench: Bench, model: ModelSpec, precision: Precision) -> Iterator[Product]:
    """As a linear layer multiplies: its output, and the gradients of its input and its weight."""
    for n, k in dict.fromkeys(_weights(bench, model)):
        weight = bench.drawn(n, k, precision=precision)
        m, most = bench.tokens
        while m <= most and m * max(n, k) <= bench.elements:
            tokens, gradient = bench.drawn(m, k, precision=precision), bench.drawn(m, n, precision=precision)
            slowest = 0.0
            for left, right in ((tokens, weight.T), (gradient, weight), (gradient.T, tokens)):
                seconds = bench.median_s(lambda a=left, b=right: a @ b)
                yield Product(precision=precision, m=left.shape[0], n=right.shape[1], k=left.shape[1], seconds=seconds)
                slowest = max(slowest, seconds)
            if slowest * GROWTH > bench.slow_s:
                break
            m *= GROWTH


def _weights(bench: Bench, model: ModelSpec) -> Iterator[tuple[int, int]]:
    """Columns and rows of a layer's matrices; of one too large for a probe, halved ones."""
    inner = model.ffn_hidden or 4 * model.hidden
    heads = (model.heads + 2 * (model.kv_heads or model.heads)) * model.head_dim
    own = model.heads * model.head_dim
    for cut in CUTS:
        for n, k in (
            (heads // cut, model.hidden),
            (model.hidden, own // cut),
            (2 * inner // cut, model.hidden),
            (model.hidden, inner // cut),
        ):
            while n * k > bench.elements:
                n, k = (n // 2, k) if n > k else (n, k // 2)
            yield max(n, 1), max(k, 1)


def _attention(bench: Bench, model: ModelSpec, precision: Precision) -> Iterator[Attention]:
    heads, tokens = max(1, model.heads // CUTS[-1]), 256
    while tokens <= max(256, model.seq_len) and heads * tokens * model.head_dim <= bench.elements:
        shape = (1, heads, tokens, model.head_dim)
        query, key, value = (bench.drawn(*shape, precision=precision).requires_grad_() for _ in range(3))
        out = bench.drawn(*shape, precision=precision)

        def passes(q=query, k=key, v=value, gradient=out) -> None:
            torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

        seconds = bench.median_s(passes)
        yield Attention(precision=precision, samples=1, heads=heads, tokens=tokens, dim=model.head_dim, seconds=seconds)
        if seconds * GROWTH > bench.slow_s:
            break
        tokens *= 2


def _copy(bench: Bench, bytes_: int) -> Copy:
    source = torch.zeros(bytes_, dtype=torch.uint8, device=bench.device)
    to = torch.ones_like(source)
    return Copy(bytes=bytes_, seconds=bench.median_s(lambda: to.copy_(source)))


def _all_reduces(bench: Bench, ranks: int) -> tuple[AllReduce, ...]:
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_rank, (ranks, folder, bench), nprocs=ranks)
        found = json.loads((Path(folder) / "found.json").read_text())
    return tuple(AllReduce(ranks=ranks, bytes=bytes_, seconds=seconds) for bytes_, seconds in found)


def _rank(rank: int, ranks: int, folder: str, bench: Bench) -> None:
    """All ranks repeat a size equally often; the first one's seconds count, and what it waits is part of them."""
    bench = dataclasses.replace(bench, clock=time.perf_counter)
    gpu = bench.device.type == "cuda"
    if gpu:
        torch.cuda.set_device(rank)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        trainer.quieten("cpu")
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    found = []
    for bytes_ in bench.reduced:
        values = torch.zeros(bytes_ // 4, device=bench.device)
        times = max(3, min(100, 32 * MIB // bytes_))
        for _ in range(3):
            dist.all_reduce(values)
        seconds = statistics.median(
            bench.timed_s(lambda tensor=values: dist.all_reduce(tensor), times) for _ in range(ROUNDS)
        )
        found.append((bytes_, seconds))
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
