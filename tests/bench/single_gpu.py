"""Our engine on one device against a plain torch loop of the same modules, bf16, a Llama of a billion parameters.

`python tests/bench/single_gpu.py`. Both live in one process and take their steps in turn. The loop has the same
numerics by hand and nothing else: bf16 parameters, fp32 ones behind them in a fused AdamW, the gradient clipped by its
norm; no DTensor, no FSDP, no mesh. A ratio is ours over theirs in steps a second, of medians: above 1, ours is faster.
MFU by the convention of `workers.flops`; memory is the most that a side's step needed, without what the other side
keeps. Without a GPU nothing is measured, unless `--device cpu` asks for the same on one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from workers.engine import Engine
from workers.models.decoder import Decoder, initialise
from workers.parallel import compiled, mesh
from workers.parallel.precision import COMPUTE
from workers.spec import RunSpec
from workers.throughput import Throughput

SIZES = {
    # layers, hidden, heads, kv heads, ffn, sequence, vocabulary, samples a step
    "1b": (16, 2048, 32, 8, 8192, 2048, 32_000, 8),
    "tiny": (2, 64, 4, 2, 176, 32, 128, 4),
}
TOLERANCE = 0.02  # relative, of losses and norms of the same steps: bf16 has 8 bits

Step = Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.device == "gpu" and not torch.cuda.is_available():
        print(json.dumps({"measured": False, "reason": "no GPU"}) if options.json else "no GPU here: nothing measured")
        return 0
    run = spec(options)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        with mesh.joined(store, 0, run.parallel, options.device, 600.0) as axes:
            found = compared(run, axes, options)
    for side in ("ours", "theirs"):
        told = "  ".join(f"{key} {value}" for key, value in found[side].items())
        print(f"{side:6}  {told}", flush=True)
    print(f"ratio {found['ratio']}  on {found['device']}, load {found['load']}")
    if options.json:
        print(json.dumps({"measured": True, **found}))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="end with one line of JSON")
    made.add_argument("--size", choices=SIZES, default="1b")
    made.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    made.add_argument("--micro-batch", type=int, help="samples a micro-batch; default the whole batch")
    made.add_argument("--compile", action="store_true", help="both sides' blocks by torch.compile")
    made.add_argument("--rounds", type=int, default=10, help="steps that count, of each")
    made.add_argument("--warm", type=int, default=3, help="steps before those")
    return made


def spec(options: argparse.Namespace) -> RunSpec:
    layers, hidden, heads, kv_heads, ffn_hidden, seq_len, vocab_size, batch = SIZES[options.size]
    return RunSpec.model_validate({
        "model": {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn_hidden": ffn_hidden,
                  "seq_len": seq_len, "vocab_size": vocab_size},
        "data": {},
        "train": {"steps": 1000, "global_batch": batch, "precision": "bf16", "decay": "constant",
                  "compile": options.compile},
        "parallel": {"micro_batch": options.micro_batch or batch},
    })  # fmt: skip


def compared(run: RunSpec, axes: DeviceMesh, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of both sides, whose losses and norms have to be the same."""
    device = mesh.device_of(options.device, 0)
    whole = torch.randint(
        run.model.vocab_size,
        (run.train.global_batch, run.model.seq_len + 1),
        generator=torch.Generator().manual_seed(3),
    )
    tokens, targets = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
    sides: dict[str, Side] = {}
    for name, build in (("ours", ours), ("theirs", theirs)):
        before = allocated(device)
        sides[name] = Side(build(run, axes, device), device)
        sides[name].step(tokens, targets)  # what it keeps for good is there from its first step on
        sides[name].kept = allocated(device) - before
    for number in range(1 - options.warm, options.rounds):
        for name in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
            others = sum(side.kept for other, side in sides.items() if other != name)
            sides[name].measure(tokens, targets, others, counts=number >= 0)
    for pair in zip(sides["ours"].outcomes, sides["theirs"].outcomes, strict=True):
        if not all(math.isclose(*figures, rel_tol=TOLERANCE) for figures in zip(*pair, strict=True)):
            raise AssertionError(f"not the same training: (loss, norm) {pair[0]} here, {pair[1]} in the loop")
    speed = Throughput.of(run, run.model.vocab_size, mesh.name_of(device))
    figures = {name: side.figures(run, speed) for name, side in sides.items()}
    return {
        **figures,
        "ratio": round(figures["theirs"]["step_s"] / figures["ours"]["step_s"], 4),
        "device": mesh.name_of(device),
        "size": options.size,
        "compile": options.compile,
        "load": round(os.getloadavg()[0], 1),
    }


class Side:
    """One of the two, and what was measured of it."""

    def __init__(self, run: Step, device: torch.device) -> None:
        self.run, self.device, self.kept = run, device, 0
        self.seconds: list[float] = []
        self.peak = 0  # bytes
        self.outcomes: list[tuple[float, float]] = []

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """Seconds until the device is done."""
        waited(self.device)
        began = time.perf_counter()
        self.outcomes.append(self.run(tokens, targets))
        waited(self.device)
        return time.perf_counter() - began

    def measure(self, tokens: torch.Tensor, targets: torch.Tensor, others: int, counts: bool) -> None:
        """A step; `others` are bytes that it finds allocated and has nothing to do with."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = self.step(tokens, targets)
        if counts:
            self.seconds.append(seconds)
            if self.device.type == "cuda":
                self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device) - others)

    def figures(self, run: RunSpec, speed: Throughput) -> dict[str, Any]:
        step_s = statistics.median(self.seconds)
        mfu = speed.mfu(step_s)
        return {
            "step_s": round(step_s, 5),
            "range_s": [round(min(self.seconds), 5), round(max(self.seconds), 5)],
            "tokens_per_s": round(run.train.global_batch * run.model.seq_len / step_s, 1),
            "mfu": None if mfu is None else round(mfu, 4),
            "memory_gib": round(self.peak / 2**30, 2) if self.peak else None,
        }


def waited(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def ours(run: RunSpec, axes: DeviceMesh, device: torch.device) -> Step:
    engine = Engine(run, run.model.vocab_size, axes, device)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        outcome = engine.step(tokens, targets)
        return outcome.loss, outcome.grad_norm

    return step


def theirs(run: RunSpec, axes: DeviceMesh, device: torch.device) -> Step:
    return Plain(run, device).step


class Plain:
    """The loop that one would write for one model on one device."""

    def __init__(self, run: RunSpec, device: torch.device) -> None:
        self.model = Decoder(run.model, run.model.vocab_size)
        initialise(self.model, run.model, run.train.seed)
        self.model.to(device)
        self.parameters = list(self.model.parameters())
        self.masters = [nn.Parameter(parameter.detach().clone()) for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.data = parameter.data.to(COMPUTE[run.train.precision])
        compiled.apply(self.model.layers.values(), run.train.compile)
        self.device, self.samples, self.clip_norm = device, run.parallel.micro_batch, run.train.clip_norm
        groups = [
            {"params": [one for one in self.masters if one.ndim >= 2], "weight_decay": run.train.weight_decay},
            {"params": [one for one in self.masters if one.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=run.train.learning_rate, betas=run.train.betas, eps=run.train.eps, fused=True
        )

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        """(loss, gradient norm) of [samples, seq]."""
        tokens, targets = tokens.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for inputs, wanted in zip(tokens.split(self.samples), targets.split(self.samples), strict=True):
            loss = self.model.seams.loss(self.model(inputs), wanted) / targets.numel()
            loss.backward()
            total += loss.detach()
            self.gather()
        norm = nn.utils.clip_grad_norm_(self.masters, self.clip_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        return total.item(), norm.item()

    @torch.no_grad()
    def gather(self) -> None:
        """Add a micro-batch's gradients to the fp32 ones."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None


if __name__ == "__main__":
    sys.exit(main())
