"""Pipeline parallelism: the layers cut into stages, run by the schedules of `torch.distributed.pipelining`.

Stage s of pp x vpp lives on pipeline rank s mod pp (interleaving: arXiv 2104.04473); under zbv (arXiv 2401.10241) the
second half runs back, so that the first and the last stage share a rank. One stage alone needs no schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

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

from workers.models.samples import Samples
from workers.parallel.mesh import hurry
from workers.spec import SINGLE_STAGE, ParallelLayout

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def stage_layers(layers: int, layout: ParallelLayout, head: float = 0.0) -> list[range]:
    """Layers of each stage in order; earlier stages take what doesn't divide (30 over 4: 8, 8, 7, 7).

    `head`: what the last stage's head costs, in layers. It counts where the layout weighs.
    """
    if isinstance(layout.stage_layers, tuple):
        sizes = list(layout.stage_layers)
    else:
        sizes, costs = [0] * layout.stages, [0.0] * layout.stages
        costs[-1] += head if layout.stage_layers == "weighed" else 0.0
        for _ in range(layers):
            least = costs.index(min(costs))
            sizes[least], costs[least] = sizes[least] + 1, costs[least] + 1
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
    """tokens, targets [micro-batches, samples, seq], and what is told of the samples of each -> the loss of each
    micro-batch, float64; zeros off the last stage."""

    def run(self, tokens: torch.Tensor, targets: torch.Tensor, samples: Sequence[Samples]) -> torch.Tensor:
        """Forward and backward."""

    def evaluate(self, tokens: torch.Tensor, targets: torch.Tensor, samples: Sequence[Samples]) -> torch.Tensor:
        """Forward alone; gradients and parameters are as before."""


class Straight:
    """One stage: micro-batches one after the other. `before` each backward pass is told whether it is the last."""

    def __init__(self, part: nn.Module, loss: Loss, before: Callable[[bool], None]) -> None:
        self.part, self.loss, self.before = part, loss, before

    def run(self, tokens: torch.Tensor, targets: torch.Tensor, samples: Sequence[Samples]) -> torch.Tensor:
        losses = []
        for index, (inputs, wanted, numbers) in enumerate(zip(tokens, targets, samples, strict=True)):
            self.before(index == len(tokens) - 1)
            loss = self.loss(self.part(inputs, numbers), wanted)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).double()

    @torch.no_grad()
    def evaluate(self, tokens: torch.Tensor, targets: torch.Tensor, samples: Sequence[Samples]) -> torch.Tensor:
        each = zip(tokens, targets, samples, strict=True)
        return torch.stack([self.loss(self.part(inputs, numbers), wanted) for inputs, wanted, numbers in each]).double()


@dataclasses.dataclass(frozen=True, slots=True)
class Shapes:
    """Of what passes between stages."""

    samples: int  # in a micro-batch
    split: int  # ranks that have the positions of a sample between them
    hidden: int
    logits: int  # of this rank
    dtype: torch.dtype

    def tokens(self, seq: int) -> torch.Tensor:
        return torch.empty(self.samples, seq, dtype=torch.int64, device="meta")

    def between(self, seq: int) -> torch.Tensor:
        return torch.empty(self.samples, seq // self.split, self.hidden, dtype=self.dtype, device="meta")

    def out(self, seq: int) -> torch.Tensor:
        return torch.empty(self.samples, seq, self.logits, dtype=self.dtype, device="meta")


class Stage(PipelineStage):
    """All shapes are given. Ranks make sure of that of each other, but where a rank is alone (`mesh.pretended`)."""

    def _warmup_forward_vote(self, has_backward: bool, received_acc: torch.Tensor | None = None) -> torch.Tensor:
        return self._alone() or super()._warmup_forward_vote(has_backward, received_acc)

    def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> torch.Tensor:
        return self._alone() or super()._warmup_backward_result(received_result)

    def _alone(self) -> torch.Tensor | None:
        return torch.ones(1, dtype=torch.int32) if dist.get_backend(self.group) == "fake" else None


class Staged:
    """This rank's stages of a pipeline under a schedule; one for each length of a sample, since a schedule takes its
    buffers from the first it sees, and for each number of micro-batches."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        loss: Loss,
        layout: ParallelLayout,
        shapes: Shapes,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.parts, self.loss, self.layout, self.shapes = parts, loss, layout, shapes
        self.mesh, self.device = mesh, device
        self.numbers, last = stages_of(mesh.get_local_rank(), layout), layout.stages - 1
        self.first, self.last = 0 in self.numbers, last in self.numbers
        self.schedules: dict[tuple[int, int], Any] = {}  # micro-batches, length of a sample -> schedule
        self.samples: list[Iterator[Samples]] = []  # of each part: of the micro-batches that are still to come
        for index, part in enumerate(parts):
            part.register_forward_pre_hook(partial(self._number, index), with_kwargs=True)

    def _number(self, index: int, part: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Adds what is told of the samples: zero-bubble schedules take no integers, and each schedule takes the
        forward passes of a stage in the order of its micro-batches."""
        return (inputs if len(inputs) > 1 else (*inputs, next(self.samples[index]))), named

    def run(self, tokens: torch.Tensor, targets: torch.Tensor, samples: Sequence[Samples]) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        inputs = (tokens.flatten(0, 1),) if self.first else ()
        wanted = targets.flatten(0, 1) if self.last else None
        self.samples = [iter(samples) for _ in self.parts]
        self._schedule(len(tokens), tokens.shape[-1]).step(
            *inputs, target=wanted, losses=losses if self.last else None, return_outputs=False
        )
        return torch.stack(losses).double() if losses else torch.zeros(len(tokens), device=self.device).double()

    def _schedule(self, runs: int, seq: int) -> Any:
        if (runs, seq) not in self.schedules:
            stages = [self._stage(part, number, seq) for part, number in zip(self.parts, self.numbers, strict=True)]
            self.schedules[runs, seq] = SCHEDULES[self.layout.schedule](
                stages[0] if self.layout.schedule in SINGLE_STAGE else stages,
                runs,
                loss_fn=self.loss,
                scale_grads=False,
            )
        return self.schedules[runs, seq]

    def _stage(self, part: nn.Module, number: int, seq: int) -> Stage:
        layout, shapes = self.layout, self.shapes
        came = shapes.tokens(seq) if number == 0 else shapes.between(seq).requires_grad_()
        gone = shapes.out(seq) if number == layout.stages - 1 else shapes.between(seq)
        return Stage(
            part,
            number,
            layout.stages,
            self.device,
            input_args=(came,),
            output_args=(gone.requires_grad_(),),
            group=self.mesh.get_group(),
        )

    @torch.no_grad()
    def evaluate(self, tokens: torch.Tensor, targets: torch.Tensor, samples: Sequence[Samples]) -> torch.Tensor:
        """Stage after stage, so that ranks work on different micro-batches at a time."""
        losses = torch.zeros(len(tokens), dtype=torch.float64, device=self.device)
        moving: list[dist.Work] = []
        local: dict[int, list[torch.Tensor]] = {}  # stage -> what the one before it, on this rank too, gave
        for part, number in zip(self.parts, self.numbers, strict=True):
            for index in range(len(tokens)):
                x = tokens[index] if number == 0 else self._taken(number, local, tokens.shape[-1])
                y = part(x, samples[index])
                if number == self.layout.stages - 1:
                    losses[index] = self.loss(y, targets[index])
                elif (to := rank_of(number + 1, self.layout)) == self.mesh.get_local_rank():
                    local.setdefault(number + 1, []).append(y)
                else:
                    moving.append(dist.isend(y, group=self.mesh.get_group(), group_dst=to))
        for work in moving:
            work.wait()
        return losses

    def _taken(self, number: int, local: dict[int, list[torch.Tensor]], seq: int) -> torch.Tensor:
        """The next micro-batch's input of a stage."""
        if number in local:
            return local[number].pop(0)
        x = torch.empty_like(self.shapes.between(seq), device=self.device)
        dist.recv(x, group=self.mesh.get_group(), group_src=rank_of(number - 1, self.layout))
        return x


class Tie:
    """Keeps an embedding that the first and the last stage share equal: its gradient is the sum of both uses."""

    def __init__(self, layout: ParallelLayout, mesh: DeviceMesh) -> None:
        ends = (rank_of(0, layout), rank_of(layout.stages - 1, layout))
        self.group: dist.ProcessGroup | None = None
        if ends[0] == ends[1]:
            return
        columns = mesh.mesh.flatten(1)  # pipeline rank x everything else
        pairs = [[int(columns[ends[0], column]), int(columns[ends[1], column])] for column in range(columns.shape[1])]
        group, _ = dist.new_subgroups_by_enumeration(pairs, group_desc="mesh_pp")
        self.group = group if group is None else hurry(group)

    def add(self, own: Sequence[torch.Tensor]) -> None:
        """Sum the gradients of the copies on this rank, and with the other end."""
        if not own:
            return
        if len(own) == 2:
            own[0].add_(own[1])
            own[1].copy_(own[0])
        elif self.group is not None:
            dist.all_reduce(own[0], group=self.group)

    def equal(self, own: Sequence[torch.Tensor]) -> bool:
        """Whether the copies on this rank, or here and at the other end, are the same bit for bit."""
        if not own:
            return True
        if len(own) == 2:
            return torch.equal(*own)
        if self.group is None:
            return True
        both = [torch.empty_like(own[0]), torch.empty_like(own[0])]
        dist.all_gather(both, own[0].contiguous(), group=self.group)
        return torch.equal(*both)
