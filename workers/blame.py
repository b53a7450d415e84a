"""Where a number that is none came from: rank, stage, micro-batch and samples. Looked for only when a step has one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from workers.numerics import local


class NonFinite(ArithmeticError):
    """Loss or gradient norm is no number, on all ranks in the same step, and training is to stop."""


class Drifted(ArithmeticError):
    """Copies of a parameter that must be equal are not: going on would spread it. The checkpoint holds one copy."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Blame:
    """The first place, along the way of a micro-batch through the stages, that had it."""

    where: str  # "activations", "loss" or "gradients"
    stage: int
    rank: int
    micro_batch: int | None = None  # of the rank's replica; None where only the step's sum is known
    samples: tuple[int, ...] = ()  # numbers in the global order

    def __str__(self) -> str:
        batch = "" if self.micro_batch is None else f", micro-batch {self.micro_batch} (samples {list(self.samples)})"
        return f"{self.where} of stage {self.stage} on rank {self.rank}{batch}"


class Sightings:
    """One figure of what each stage gave for each micro-batch; kept on the device, looked at when there is need."""

    def __init__(self, parts: Sequence[tuple[int, nn.Module]], stages: int) -> None:
        self.stages = [number for number, _ in parts]
        self.last = stages - 1
        self.seen: dict[int, list[torch.Tensor]] = {number: [] for number in self.stages}
        self.losses = torch.zeros(0)
        for number, part in parts:
            if number != self.last:  # the last one's are the losses
                part.register_forward_hook(lambda _, __, out, number=number: self._see(number, out))

    def _see(self, number: int, out: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            self.seen[number].append(out.detach().sum(dtype=torch.float32))

    def reset(self) -> None:
        for figures in self.seen.values():
            figures.clear()

    def blame(self, named: Mapping[str, nn.Parameter], samples: Sequence[Sequence[int]]) -> Blame:
        """The same on all ranks, which all call it. `samples`: the numbers in each micro-batch of this replica."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self._own(named, samples))
        known = [one for places in found for one in places]
        forward = [one for one in known if one.where != "gradients"]
        if forward:
            return min(forward, key=lambda one: (one.stage, one.micro_batch, one.rank))
        backward = max(known, key=lambda one: (one.stage, -one.rank), default=None)
        return backward or Blame("gradients", self.last, 0)

    def _own(self, named: Mapping[str, nn.Parameter], samples: Sequence[Sequence[int]]) -> list[Blame]:
        rank, found = dist.get_rank(), []
        figures = {**self.seen, self.last: list(self.losses)} if self.last in self.stages else self.seen
        for stage, each in figures.items():
            where = "loss" if stage == self.last else "activations"
            for index, (figure, numbers) in enumerate(zip(each, samples, strict=False)):  # empty ones have no samples
                if not figure.isfinite():
                    found.append(Blame(where, stage, rank, index, tuple(numbers)))
        if any(p.grad is not None and not local(p.grad).isfinite().all() for p in named.values()):
            found.append(Blame("gradients", max(self.stages), rank))
        return found
