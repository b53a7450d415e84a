"""One rank's share of the model, its gradients and its optimizer, under one layout: build, step, state.

Puts the axes together; each of them is in `workers.parallel` and knows nothing of the others.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch.distributed.device_mesh import DeviceMesh

from workers import numerics
from workers.models.decoder import Decoder, initialise
from workers.optimizer import Optimizer, gradients
from workers.parallel import data, pipeline, tensor
from workers.spec import RunSpec, check_layout

PARAMETERS = {"bf16": torch.float32, "fp32": torch.float32, "float64": torch.float64}
COMPUTE = {"bf16": torch.bfloat16, "fp32": torch.float32, "float64": torch.float64}


class NonFinite(ArithmeticError):
    """Loss or gradient norm is not a number; all ranks see it in the same step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Of one step, equal on all ranks."""

    loss: float  # mean over the step's tokens, nats
    grad_norm: float  # before clipping
    learning_rate: float


class Engine:
    """The training state of one rank. Everything collective here is called by all ranks in the same order."""

    def __init__(self, run: RunSpec, vocabulary: int, mesh: DeviceMesh, device: torch.device) -> None:
        self.run, self.device, self.layout = run, device, run.parallel
        self.vocabulary = run.model.vocab_size or vocabulary
        if self.vocabulary < vocabulary:
            raise ValueError(f"model.vocab_size {self.vocabulary} is smaller than the tokenizer's {vocabulary}")
        check_layout(self.layout, run.model.model_copy(update={"vocab_size": self.vocabulary}), run.train)
        self.parts = self._build(mesh)
        named = dict(pair for part in self.parts for pair in part.named_parameters())
        self.named = named
        self.optimizer = Optimizer(run.train, named)
        self.counts_loss = mesh["tp"].get_local_rank() == 0
        self.pipeline = self._pipeline(mesh)
        self.replica = mesh["dp"].get_local_rank()

    def _build(self, mesh: DeviceMesh) -> list[Decoder]:
        model, precision = self.run.model, self.run.train.precision
        layers = pipeline.stage_layers(model.layers, self.layout.stages)
        parts = []
        for stage in pipeline.stages_of(mesh["pp"].get_local_rank(), self.layout):
            part = Decoder(
                model,
                self.vocabulary,
                layers=layers[stage],
                first=stage == 0,
                last=stage == self.layout.stages - 1,
                dtype=PARAMETERS[precision],
            )
            initialise(part, model, self.run.train.seed)
            tensor.apply(part, model, self.vocabulary, mesh["tp"])
            part.to(self.device)  # after the split: a whole stage need not fit one device
            data.apply(part, mesh["dp"], COMPUTE[precision], PARAMETERS[precision])
            parts.append(part)
        return parts

    def _pipeline(self, mesh: DeviceMesh) -> pipeline.Pipeline:
        train, layout = self.run.train, self.layout
        scale = 1.0 / (train.global_batch * self.run.model.seq_len)
        seams = self.parts[-1].seams

        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return seams.loss(logits, targets) * scale

        micro_batches = layout.micro_batches(train.global_batch)
        if layout.pp == 1:
            return pipeline.Straight(self.parts[0], loss, micro_batches)
        chunk = math.ceil(self.vocabulary / layout.tp)
        logits = min(chunk, max(0, self.vocabulary - chunk * mesh["tp"].get_local_rank()))
        return pipeline.Staged(
            self.parts,
            loss,
            layout,
            micro_batches,
            self.run.model,
            logits,
            COMPUTE[train.precision],
            mesh["pp"],
            self.device,
        )

    def share(self, cursor: int) -> tuple[int, int]:
        """(first, count) of the samples that this rank's replica takes of the step at `cursor`."""
        count = self.run.train.global_batch // self.layout.dp
        return cursor + self.replica * count, count

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> Outcome:
        """An optimizer step over [samples, seq] of this replica. Raises NonFinite on all ranks at once."""
        loss, norm = self.gradient(tokens, targets)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise NonFinite(f"loss {loss}, gradient norm {norm} at step {self.optimizer.steps + 1}")
        if self.run.train.clip_norm is not None:
            numerics.clip(gradients(self.named.values()), norm, self.run.train.clip_norm)
        return Outcome(loss, norm, self.optimizer.step())

    def gradient(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        """Forward and backward; (loss, gradient norm) of the world. Gradients are left in the parameters."""
        loss = self.pipeline.run(tokens.to(self.device), targets.to(self.device))
        share = loss if self.counts_loss else torch.zeros_like(loss)
        return numerics.agree(share, numerics.local_square(self.named.values()))

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor of the training state by logical name: DTensors on the (dp, tp) mesh."""
        return {**{f"model.{name}": p.detach() for name, p in self.named.items()}, **self.optimizer.state()}

    def axes(self) -> dict[str, tuple[int, ...]]:
        """Stored order of each tensor's dimensions."""
        return {name: tensor.stored_axes(name, value.ndim) for name, value in self.state().items()}
