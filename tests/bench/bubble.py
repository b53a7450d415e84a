"""The bubble of each pipeline schedule, measured beside theory: torch's schedules as the engine runs them, on gloo.

`python tests/bench/bubble.py`. Stages compute nothing: a pass sleeps for as long as it is said to take, so that neither
cores nor their load matter much. A stage's passes forward, back to its inputs and back to its weights take the same
time. The bubble is 1 - work / step, where a step is the longest of the ranks' times from its first pass to its last,
the fastest of some steps; `whole` is the same of the time from the first rank's first pass to the last one's last,
which a run pays that waits for all ranks after each step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

import torch
import torch.distributed as dist
from torch import nn

from tests.pool import Pool
from workers import bubble
from workers.parallel import mesh, pipeline
from workers.spec import ParallelLayout

RANKS = 4
CASES = (
    # schedule, stages a rank, micro-batches
    ("gpipe", 1, 4), ("gpipe", 1, 8), ("gpipe", 1, 16),
    ("1f1b", 1, 4), ("1f1b", 1, 8), ("1f1b", 1, 16),
    ("interleaved_1f1b", 2, 4), ("interleaved_1f1b", 2, 8), ("interleaved_1f1b", 2, 16), ("interleaved_1f1b", 4, 8),
    ("interleaved_zb", 2, 8), ("interleaved_zb", 2, 16),
    ("zbv", 2, 8), ("zbv", 2, 16),
)  # fmt: skip
WIDTH, SEQ = 8, 4


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Of one rank, in seconds; `begin` and `end` by a clock that all processes share."""

    begin: float
    end: float
    work: float  # within the passes

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    members = Pool(RANKS)
    try:
        found = [measured(members, *case, options) for case in CASES if wanted(*case, options)]
    finally:
        members.end()
    if options.json:
        print(json.dumps({"ranks": RANKS, "pass_s": options.pass_s, "rounds": options.rounds, "cases": found}))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="end with one line of JSON")
    made.add_argument("--pass-s", type=float, default=0.04, help="seconds of a stage's pass forward")
    made.add_argument("--rounds", type=int, default=3, help="steps, of which the fastest counts")
    made.add_argument("--schedules", nargs="+", choices=pipeline.SCHEDULES, default=list(pipeline.SCHEDULES))
    made.add_argument("--micro-batches", nargs="+", type=int, help="only cases of so many")
    return made


def wanted(schedule: str, vpp: int, micro_batches: int, options: argparse.Namespace) -> bool:
    return schedule in options.schedules and micro_batches in (options.micro_batches or [micro_batches])


def measured(members: Pool, schedule: str, vpp: int, micro_batches: int, options: argparse.Namespace) -> dict[str, Any]:
    layout = ParallelLayout.model_validate({"pp": RANKS, "vpp": vpp, "schedule": schedule})
    ranks = members.run(RANKS, run, layout, micro_batches, options.pass_s, options.rounds)
    fastest = min(zip(*ranks, strict=True), key=lambda step: max(one.seconds for one in step))
    figures = {
        "theory": bubble.fraction(layout, micro_batches),
        "measured": waited(fastest),
        "whole": waited_in_all(fastest),
        "load": os.getloadavg()[0],
    }
    figures = {key: round(value, 4) for key, value in figures.items()}
    told = "  ".join(f"{key} {value:.3f}" for key, value in figures.items())
    print(f"{schedule:16} v {vpp}  m {micro_batches:2}  {told}", flush=True)
    return {"schedule": schedule, "vpp": vpp, "micro_batches": micro_batches, **figures}


def waited(ranks: Sequence[Step]) -> float:
    """On the rank that takes longest."""
    longest = max(ranks, key=lambda step: step.seconds)
    return 1 - longest.work / longest.seconds


def waited_in_all(ranks: Sequence[Step]) -> float:
    """In the mean of the ranks, from the first rank's begin to the last one's end."""
    whole = max(step.end for step in ranks) - min(step.begin for step in ranks)
    return 1 - sum(step.work for step in ranks) / len(ranks) / whole


def run(
    store: dist.Store, rank: int, layout: ParallelLayout, micro_batches: int, pass_s: float, rounds: int
) -> list[Step]:
    """This rank's steps, after one to warm up."""
    with mesh.joined(store, rank, layout, "cpu", 60.0) as axes:
        parts = [Asleep(pass_s, first=stage == 0) for stage in pipeline.stages_of(rank, layout)]
        shapes = pipeline.Shapes(1, 1, WIDTH, WIDTH, torch.float32)
        staged = pipeline.Staged(parts, loss, layout, shapes, axes["pp"], torch.device("cpu"))
        tokens = torch.zeros(micro_batches, 1, SEQ, dtype=torch.int64)
        steps = []
        for _ in range(rounds + 1):
            dist.barrier()
            PASSES.clear()
            staged.run(tokens, tokens, torch.zeros(micro_batches, 1))
            steps.append(Step(PASSES[0][0], PASSES[-1][1], sum(end - begin for begin, end in PASSES)))
        return steps[1:]


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.sum()


PASSES: list[tuple[float, float]] = []
"""When those of this process began and ended."""


def sleep(seconds: float) -> None:
    begin = time.perf_counter()
    time.sleep(seconds)
    PASSES.append((begin, time.perf_counter()))


class Asleep(nn.Module):
    """A stage whose passes take a fixed time: forward, back to its inputs, back to its weights."""

    def __init__(self, pass_s: float, first: bool) -> None:
        super().__init__()
        self.pass_s = pass_s
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.embedding = nn.Parameter(torch.ones(1, WIDTH)) if first else None

    def forward(self, x: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding[x]
        return Pass.apply(x, self.weight, self.pass_s)


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, pass_s: float) -> torch.Tensor:
        ctx.pass_s, ctx.shape = pass_s, weight.shape
        sleep(pass_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Of a split pass only one of the two is asked for."""
        to_inputs, to_weights, _ = ctx.needs_input_grad
        sleep(ctx.pass_s * (to_inputs + to_weights))
        return gradient.contiguous() if to_inputs else None, gradient.new_ones(ctx.shape) if to_weights else None, None


if __name__ == "__main__":
    sys.exit(main())
