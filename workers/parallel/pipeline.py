"""Pipeline parallelism: the layers cut into stages, run by the schedules of `torch.distributed.pipelining`.

Stage s of pp x vpp lives on pipeline rank s mod pp (interleaving: arXiv 2104.04473); under zbv (arXiv 2401.10241) the
second half runs back, so that the first and the last stage share a rank. One stage alone needs no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from workers.parallel import data
from workers.spec import SINGLE_STAGE, ParallelLayout

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def stage_layers(layers: int, layout: ParallelLayout) -> list[range]:
    """Layers of each stage in order; earlier stages take what doesn't divide (30 over 4: 8, 8, 7, 7)."""
    each, extra = divmod(layers, layout.stages)
    sizes = layout.stage_layers or [each + (stage < extra) for stage in range(layout.stages)]
    starts = [sum(sizes[:stage]) for stage in range(layout.stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def stages_of(pp_rank: int, layout: ParallelLayout) -> list[int]:
    """Stages on this pipeline rank, first to last."""
    if layout.schedule == "zbv":
        return [pp_rank, layout.stages - 1 - pp_rank]
    return list(range(pp_rank, layout.stages, layout.pp))


def rank_of(stage: int, layout: ParallelLayout) -> int:
    """The pipeline rank that a stage is on."""
    return next(rank for rank in range(layout.pp) if stage in stages_of(rank, layout))


class Pipeline(Protocol):
    def run(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward of [micro-batches, samples, seq]. The summed loss; zero off the last stage."""


class Straight:
    """One stage: micro-batches one after the other. Gradients are reduced with the last, or with each."""

    def __init__(self, part: nn.Module, loss: Loss, zero: int) -> None:
        self.part, self.loss, self.zero = part, loss, zero

    def run(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for index, (inputs, wanted) in enumerate(zip(tokens, targets, strict=True)):
            data.before_backward(self.part, index == len(tokens) - 1, self.zero)
            loss = self.loss(self.part(inputs), wanted)
            loss.backward()
            total += loss.detach()
        return total


class Shapes:
    """What passes between stages, as meta tensors: (samples, seq) tokens, hidden states, this rank's logits."""

    def __init__(self, samples: int, seq: int, split: int, hidden: int, logits: int, dtype: torch.dtype) -> None:
        self.tokens = torch.empty(samples, seq, dtype=torch.int64, device="meta")
        self.hidden = torch.empty(samples, seq // split, hidden, dtype=dtype, device="meta").requires_grad_()
        self.logits = torch.empty(samples, seq, logits, dtype=dtype, device="meta").requires_grad_()


class Staged:
    """This rank's stages of a pipeline under a schedule of `runs` micro-batches."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        loss: Loss,
        layout: ParallelLayout,
        runs: int,
        shapes: Shapes,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        numbers, last = stages_of(mesh.get_local_rank(), layout), layout.stages - 1
        stages = [
            PipelineStage(
                part if layout.zero == 1 else data.EveryBackward(part),
                number,
                layout.stages,
                device,
                input_args=(shapes.tokens if number == 0 else shapes.hidden,),
                output_args=(shapes.logits if number == last else shapes.hidden,),
                group=mesh.get_group(),
            )
            for part, number in zip(parts, numbers, strict=True)
        ]
        self.first, self.last = 0 in numbers, last in numbers
        self.schedule = SCHEDULES[layout.schedule](
            stages[0] if layout.schedule in SINGLE_STAGE else stages, runs, loss_fn=loss, scale_grads=False
        )

    def run(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        inputs = (tokens.flatten(0, 1),) if self.first else ()
        wanted = targets.flatten(0, 1) if self.last else None
        self.schedule.step(*inputs, target=wanted, losses=losses if self.last else None, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        return total + torch.stack(losses).to(torch.float64).sum() if losses else total


class Tie:
    """Keeps an embedding that the first and the last stage share equal: its gradient is the sum of both uses."""

    def __init__(self, layout: ParallelLayout, mesh: DeviceMesh) -> None:
        ends = (rank_of(0, layout), rank_of(layout.stages - 1, layout))
        self.group: dist.ProcessGroup | None = None
        if ends[0] == ends[1]:
            return
        columns = mesh.mesh.flatten(1)  # pipeline rank x everything else
        pairs = [[int(columns[ends[0], column]), int(columns[ends[1], column])] for column in range(columns.shape[1])]
        self.group, _ = dist.new_subgroups_by_enumeration(pairs)

    def add(self, own: Sequence[torch.Tensor]) -> None:
        """Sum the gradients of the copies on this rank, and with the other end."""
        if not own:
            return
        if len(own) == 2:
            own[0].add_(own[1])
            own[1].copy_(own[0])
        elif self.group is not None:
            dist.all_reduce(own[0], group=self.group)
