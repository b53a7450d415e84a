"""One rank's share of the model, its gradients and its optimizer, under one layout: build, step, state.

Puts the axes together; each of them is in `workers.parallel` and knows nothing of the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from workers import numerics
from workers.models.decoder import Decoder, initialise
from workers.models.seams import IGNORED
from workers.optimizer import Optimizer, gradients
from workers.parallel import data, pipeline, recompute, tensor
from workers.spec import RunSpec, check_layout
from workers.throughput import Stopwatch

PARAMETERS = {"bf16": torch.float32, "fp32": torch.float32, "float64": torch.float64}
COMPUTE = {"bf16": torch.bfloat16, "fp32": torch.float32, "float64": torch.float64}

State = dict[str, torch.Tensor]


class NonFinite(ArithmeticError):
    """Loss or gradient norm is not a number; all ranks see it in the same step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Of one step, equal on all ranks."""

    loss: float  # mean over the step's tokens, nats
    grad_norm: float  # of that mean, before clipping
    tokens: int  # that were learned, each counted once
    learning_rate: float = 0.0


class Engine:
    """The training state of one rank. Everything collective here is called by all ranks in the same order."""

    def __init__(self, run: RunSpec, vocabulary: int, mesh: DeviceMesh, device: torch.device) -> None:
        self.run, self.device, self.layout = run, device, run.parallel
        self.vocabulary = run.model.vocab_size or vocabulary
        if self.vocabulary < vocabulary:
            raise ValueError(f"model.vocab_size {self.vocabulary} is smaller than the tokenizer's {vocabulary}")
        check_layout(self.layout, run.model.model_copy(update={"vocab_size": self.vocabulary}), run.train)
        pp, replicate, shard, tp = mesh.get_coordinate() or ()
        self.replica = replicate * (self.layout.dp // self.layout.replicate) + shard
        self.counts_loss, self.counts_tokens = tp == 0, tp == 0 and pp == 0
        self.parts = self._build(mesh)
        self.named, self.copies = self._parameters()
        self.optimizer = Optimizer(run.train, [*self.named.values(), *self.copies.values()])
        self.tie = pipeline.Tie(self.layout, mesh) if run.model.tied_embedding and self.layout.pp > 1 else None
        self.pipeline = self._pipeline(mesh)
        self.watch = Stopwatch()

    def _build(self, mesh: DeviceMesh) -> list[Decoder]:
        model, layout, train = self.run.model, self.layout, self.run.train
        layers = pipeline.stage_layers(model.layers, layout)
        replicas = mesh["replicate", "shard"] if layout.replicate > 1 else mesh["shard"]
        reduce = torch.bfloat16 if train.reduce_dtype == "bf16" else PARAMETERS[train.precision]
        parts = []
        for stage in pipeline.stages_of(mesh["pp"].get_local_rank(), layout):
            first, last = stage == 0, stage == layout.stages - 1
            dtype = PARAMETERS[train.precision]
            part = Decoder(model, self.vocabulary, layers=layers[stage], first=first, last=last, dtype=dtype)
            initialise(part, model, train.seed)
            tensor.apply(part, model, self.vocabulary, mesh["tp"], layout.splits_sequence(model.seq_len))
            part.to(self.device)  # after the split: a whole stage need not fit one device
            recompute.apply(part.layers.values(), layout.recompute)
            data.apply(part, part.layers.values(), replicas, layout.zero, COMPUTE[train.precision], reduce)
            parts.append(part)
        return parts

    def _parameters(self) -> tuple[dict[str, torch.nn.Parameter], dict[str, torch.nn.Parameter]]:
        """By logical name: those of this rank, and its copies of what another stage owns (a tied embedding)."""
        named, copies = {}, {}
        for part in self.parts:
            for name, parameter in part.named_parameters():
                copied = name == "embedding.weight" and not part.first
                (copies if copied else named)[name] = parameter
        return named, copies

    def _pipeline(self, mesh: DeviceMesh) -> pipeline.Pipeline:
        train, layout, model = self.run.train, self.layout, self.run.model
        scale = 1.0 / self.planned_tokens
        seams = self.parts[-1].seams

        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return seams.loss(logits, targets) * scale

        if layout.pp == 1:
            return pipeline.Straight(self.parts[0], loss, layout.zero)
        chunk = math.ceil(self.vocabulary / layout.tp)
        logits = min(chunk, max(0, self.vocabulary - chunk * mesh["tp"].get_local_rank()))
        split = layout.tp if layout.splits_sequence(model.seq_len) else 1
        shapes = pipeline.Shapes(
            layout.micro_batch, model.seq_len, split, model.hidden, logits, COMPUTE[train.precision]
        )
        runs = layout.runs(train.global_batch)[self.replica]
        return pipeline.Staged(self.parts, loss, layout, runs, shapes, mesh["pp"], self.device)

    @property
    def planned_tokens(self) -> int:
        """Of a step in which every target counts."""
        return self.run.train.global_batch * self.run.model.seq_len

    def share(self, cursor: int) -> tuple[int, int]:
        """(first, count) of the samples that this rank's replica takes of the step at `cursor`."""
        counts = self.layout.micro_batches(self.run.train.global_batch)
        before = sum(counts[: self.replica])
        return cursor + before * self.layout.micro_batch, counts[self.replica] * self.layout.micro_batch

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> Outcome:
        """An optimizer step over [samples, seq] of this replica. Raises NonFinite on all ranks at once."""
        outcome = self.gradient(tokens, targets)
        self.watch.lap("forward_backward")  # figures that ranks agreed on have been waited for
        if not math.isfinite(outcome.loss) or not math.isfinite(outcome.grad_norm):
            where = f"at step {self.optimizer.steps + 1}"
            raise NonFinite(f"loss {outcome.loss}, gradient norm {outcome.grad_norm} {where}")
        numerics.clip(self._gradients(), outcome.grad_norm, self.run.train.clip_norm)
        outcome = dataclasses.replace(outcome, learning_rate=self.optimizer.step())
        self.watch.lap("optimizer")
        return outcome

    def gradient(self, tokens: torch.Tensor, targets: torch.Tensor) -> Outcome:
        """Forward and backward. The gradients left in the parameters are of the mean over the world's tokens."""
        counted = (targets != IGNORED).sum() if self.counts_tokens else torch.zeros(())
        loss = self.pipeline.run(*self._micro_batches(tokens, targets))
        if self.tie is not None:
            tied = [p for p in (self.named.get("embedding.weight"), *self.copies.values()) if p is not None]
            self.tie.add(gradients(tied))
        share = loss if self.counts_loss else torch.zeros_like(loss)
        square = numerics.local_square(self.named.values())
        total, norm, count = numerics.agree(share, square, counted.to(self.device))
        factor = self.planned_tokens / max(count, 1)  # 1 unless some targets are ignored
        if factor != 1.0:
            torch._foreach_mul_(self._gradients(), factor)
        return Outcome(total * factor, norm * factor, int(count))

    def _micro_batches(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[samples, seq] -> [runs, micro-batch, seq]; empty micro-batches, whose targets are ignored, come last."""
        size, seq = self.layout.micro_batch, tokens.shape[-1]
        empty = self.layout.runs(self.run.train.global_batch)[self.replica] - len(tokens) // size
        tokens = torch.cat((tokens.view(-1, size, seq), tokens.new_zeros(empty, size, seq)))
        targets = torch.cat((targets.view(-1, size, seq), targets.new_full((empty, size, seq), IGNORED)))
        return tokens.to(self.device), targets.to(self.device)

    def _gradients(self) -> list[torch.Tensor]:
        return gradients([*self.named.values(), *self.copies.values()])

    def state(self) -> State:
        """Every tensor of the training state that this rank owns, by logical name: DTensors on the (dp, tp) mesh."""
        return self._state(self.named)

    def restore(self, fill: Callable[[State], None], steps: int) -> None:
        """Continue after `steps` steps: `fill` fills tensors by logical name, copies of other stages' tensors too."""
        own, copies = self._state(self.named), self._state(self.copies)
        fill({**copies, **own})
        for name, copy in copies.items():
            if name in own:
                copy.copy_(own[name])
        self.optimizer.resume(steps)

    def _state(self, named: Mapping[str, torch.nn.Parameter]) -> State:
        return {**{f"model.{name}": p.detach() for name, p in named.items()}, **self.optimizer.state(named)}

    def axes(self) -> dict[str, tuple[int, ...]]:
        """Stored order of each tensor's dimensions."""
        return {name: tensor.stored_axes(name, value.ndim) for name, value in self.state().items()}
