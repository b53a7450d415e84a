"""Pipeline parallelism: the layers cut into stages, run by the schedules of `torch.distributed.pipelining`.

Stage s of pp x vpp stages lives on pipeline rank s mod pp (interleaving: arXiv 2104.04473). One stage alone is run
micro-batch by micro-batch without a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from workers.parallel import data
from workers.parallel.tensor import Loss
from workers.spec import ModelSpec, ParallelLayout


def stage_layers(layers: int, stages: int) -> list[range]:
    """Layers of each stage in order; earlier stages take what doesn't divide (30 over 4: 8, 8, 7, 7)."""
    each, extra = divmod(layers, stages)
    sizes = [each + (stage < extra) for stage in range(stages)]
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def stages_of(pp_rank: int, layout: ParallelLayout) -> list[int]:
    """Stages on this pipeline rank, first to last."""
    return list(range(pp_rank, layout.stages, layout.pp))


class Pipeline(Protocol):
    def run(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward of this replica's batch, [samples, seq]. The summed loss; zero off the last stage."""


class Straight:
    """One stage: micro-batches one after the other, gradients reduced with the last."""

    def __init__(self, part: nn.Module, loss: Loss, micro_batches: int) -> None:
        self.part, self.loss, self.micro_batches = part, loss, micro_batches

    def run(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        pairs = list(zip(tokens.chunk(self.micro_batches), targets.chunk(self.micro_batches), strict=True))
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for index, (inputs, wanted) in enumerate(pairs):
            data.reduce_on_backward(self.part, index == len(pairs) - 1)
            loss = self.loss(self.part(inputs), wanted)
            loss.backward()
            total += loss.detach()
        return total


class Staged:
    """This rank's stages of a pipeline under a schedule."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        loss: Loss,
        layout: ParallelLayout,
        micro_batches: int,
        spec: ModelSpec,
        logits: int,
        compute: torch.dtype,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        group, rank = mesh.get_group(), mesh.get_local_rank()
        numbers = stages_of(rank, layout)
        tokens = torch.empty(layout.micro_batch, spec.seq_len, dtype=torch.int64, device="meta")
        hidden = torch.empty(layout.micro_batch, spec.seq_len, spec.hidden, dtype=compute, device="meta")
        scores = torch.empty(layout.micro_batch, spec.seq_len, logits, dtype=compute, device="meta")
        stages = [
            PipelineStage(
                part,
                number,
                layout.stages,
                device,
                input_args=(tokens if number == 0 else hidden.requires_grad_(),),
                output_args=((scores if number == layout.stages - 1 else hidden).requires_grad_(),),
                group=group,
            )
            for part, number in zip(parts, numbers, strict=True)
        ]
        self.first, self.last = numbers[0] == 0, numbers[-1] == layout.stages - 1
        self.schedule = (
            ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=loss, scale_grads=False)
            if layout.schedule == "interleaved_1f1b"
            else Schedule1F1B(stages[0], micro_batches, loss_fn=loss, scale_grads=False)
        )

    def run(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if self.first else ()
        wanted = targets if self.last else None
        self.schedule.step(*inputs, target=wanted, losses=losses if self.last else None, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        return total + torch.stack(losses).to(torch.float64).sum() if losses else total
