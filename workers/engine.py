"""One rank's share of the model, its gradients and its optimizer, under one layout: build, step, state.

Puts the axes together; each of them is in `workers.parallel` and knows nothing of the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from workers import flops, numerics
from workers.blame import Blame, Sightings
from workers.models import frozen, lora, registry
from workers.models.decoder import initialise
from workers.models.moe import MixtureOfExperts
from workers.models.samples import Samples
from workers.models.seams import IGNORED, NOBODY
from workers.models.sharding import dimension, sliced
from workers.numerics import local
from workers.optimizer import Optimizer, gradients
from workers.parallel import compiled, data, expert, mesh, pipeline, recompute, tensor
from workers.parallel.cuts import Cut, placed
from workers.parallel.precision import COMPUTE, PARAMETERS, LossScale
from workers.spec import RunSpec, check_layout
from workers.throughput import Stopwatch

State = dict[str, torch.Tensor]
Aside = Callable[[], Sequence[float]]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Of one step, equal on all ranks."""

    loss: float  # mean over the step's tokens, nats
    grad_norm: float  # of that mean, before clipping
    tokens: int  # that were learned, each counted once
    learning_rate: float = 0.0
    blame: Blame | None = None  # where it began, when loss or norm is no number; nothing was changed then
    excused: bool = False  # the loss scale was too high: it has been lowered
    aside: tuple[float, ...] = ()  # sums over ranks of what each had to say beside

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Engine:
    """The training state of one rank. Everything collective here is called by all ranks in the same order."""

    def __init__(self, run: RunSpec, vocabulary: int, axes: DeviceMesh, device: torch.device) -> None:
        self.run, self.device, self.layout, self.mesh = run, device, run.parallel, axes
        self.vocabulary = run.model.vocab_size or vocabulary
        if self.vocabulary < vocabulary:
            raise ValueError(f"model.vocab_size {self.vocabulary} is smaller than the tokenizer's {vocabulary}")
        check_layout(self.layout, run.model.model_copy(update={"vocab_size": self.vocabulary}), run.train)
        pp, replicate, shard, tp = axes.get_coordinate() or ()
        self.replica = replicate * (self.layout.dp // self.layout.replicate) + shard
        self.counts_loss, self.counts_tokens = tp == 0, tp == 0 and pp == 0
        self.scale = LossScale(run.train.precision)
        self.stages = pipeline.stages_of(pp, self.layout)
        self.rules = registry.rules(run.model)
        self._check_names()
        self.cuts: dict[str, Cut] = {}
        self.experts = mesh.of_experts(self.layout, device) if run.model.experts else None
        self.spread = axes["replicate", "shard", "tp"]  # over which the state lies; to cut a mesh takes long
        self.experts_spread = None if self.experts is None else self.experts["replicate", "edp", "ep"]
        self.parts = self._build()
        self.named, self.copies = self._parameters()
        self.trained = {name: parameter for name, parameter in self.named.items() if parameter.requires_grad}
        copies = [numerics.copies(self._placed(name, parameter.detach())) for name, parameter in self.trained.items()]
        self.shares = 1 / torch.tensor(copies, dtype=torch.float64, device=device)
        self.partial = [
            parameter for name, parameter in self.trained.items() if name in self.cuts and self.cuts[name].partial
        ]
        self.moes = {
            name: module
            for part in self.parts
            for name, module in part.named_modules()
            if isinstance(module, MixtureOfExperts) and module.spec.bias_rate
        }
        self.stage = mesh.hurry(self.spread._flatten("stage").get_group()) if self.moes else None
        everything = (*self.named.values(), *self.copies.values())
        self.optimizer = Optimizer(run.train, [one for one in everything if one.requires_grad])
        self.owned: State | None = None
        shared = run.model.tied_embedding and self.layout.pp > 1 and all(one.requires_grad for one in self._tied())
        self.tie = pipeline.Tie(self.layout, axes) if shared else None
        self.pipeline = self._pipeline()
        self.before_update: Callable[[], None] = lambda: None  # the state is about to change: copies may be under way
        self.sightings = Sightings(list(zip(self.stages, self.parts, strict=True)), self.layout.stages)
        self.watch = Stopwatch()

    def _build(self) -> list[nn.Module]:
        model, layout, train = self.run.model, self.layout, self.run.train
        layers = pipeline.stage_layers(model.layers, layout, flops.head(model, self.vocabulary))
        replicas = data.over(self.mesh, "shard")
        reduce = torch.bfloat16 if train.reduce_dtype == "bf16" else PARAMETERS[train.precision]
        parts = []
        for stage in self.stages:
            first, last = stage == 0, stage == layout.stages - 1
            dtype = PARAMETERS[train.precision]
            which = {"layers": layers[stage], "first": first, "last": last, "dtype": dtype}
            part = registry.part(model, self.vocabulary, train.freeze, **which)
            initialise(part, model, train.seed)
            inner: list[tuple[nn.Module, DeviceMesh]] = []
            if self.experts is not None:
                self.cuts |= expert.apply(part, self.rules, self.experts["ep"])
                inner += [(one, data.over(self.experts, "edp")) for one in expert.experts_of(part)]
            split = layout.splits_sequence(model.seq_len)
            self.cuts |= tensor.apply(part, self.rules, model, self.vocabulary, self.mesh["tp"], split)
            part.seams.seed = train.seed
            part.to(self.device)  # after the split: a whole stage need not fit one device
            recompute.apply(part.layers.values(), layout.recompute)
            compiled.apply(part.layers.values(), train.compile)
            inner += [(block, replicas) for block in part.layers.values()] if layout.zero == 3 else []
            data.apply(part, inner, replicas, layout.zero, COMPUTE[train.precision], reduce)
            parts.append(part)
        return parts

    def _parameters(self) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """By logical name: those of this rank, and its copies of what another stage owns (a tied embedding)."""
        named, copies = {}, {}
        for part in self.parts:
            for name, parameter in part.named_parameters():
                copied = name == "embedding.weight" and not part.first
                (copies if copied else named)[name] = parameter
        return named, copies

    def _pipeline(self) -> pipeline.Pipeline:
        train, layout, model = self.run.train, self.layout, self.run.model
        seams = self.parts[-1].seams

        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return seams.loss(logits, targets) * seams.scale

        if layout.pp == 1:
            return pipeline.Straight(
                self.parts[0], loss, partial(data.before_backward, self.parts[0], zero=layout.zero)
            )
        chunk = math.ceil(self.vocabulary / layout.tp)
        logits = min(chunk, max(0, self.vocabulary - chunk * self.mesh["tp"].get_local_rank()))
        split = layout.tp if layout.splits_sequence(model.seq_len) else 1
        shapes = pipeline.Shapes(layout.micro_batch, split, model.hidden, logits, COMPUTE[train.precision])
        parts = self.parts if layout.zero == 1 else [data.EveryBackward(part) for part in self.parts]
        return pipeline.Staged(parts, loss, layout, shapes, self.mesh["pp"], self.device)

    @property
    def planned_tokens(self) -> int:
        """Of a step in which every target counts."""
        return self.run.train.global_batch * self.run.model.seq_len

    def share(self, cursor: int) -> tuple[int, int]:
        """(first, count) of the samples that this rank's replica takes of the step at `cursor`."""
        return self.layout.share(cursor, self.run.train.global_batch, self.replica)

    def step(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        first: int = 0,
        aside: Aside = tuple,
        starts: torch.Tensor | None = None,
    ) -> Outcome:
        """An optimizer step over [samples, seq] of this replica, the first being sample number `first`. `starts`: of
        packed samples, where in it the document of each position begins.

        Where loss or gradient is no number all ranks see it at once: nothing is changed, and it is said why. What
        `aside` says when the figures of the step are summed over ranks is summed with them, at no message's cost.
        """
        outcome = self.gradient(tokens, targets, first, aside, starts)
        self.watch.lap("reduction" if self.device.type == "cpu" else "forward_backward")  # the figures are waited for
        if not outcome.finite:
            numbers = torch.arange(first, first + len(tokens)).view(-1, self.layout.micro_batch)
            blame = self.sightings.blame(self.named, numbers.tolist())
            self.optimizer.drop()
            excused = math.isfinite(outcome.loss) and self.scale.update(False)
            return dataclasses.replace(outcome, blame=blame, excused=excused)
        numerics.clip(self._gradients(), outcome.grad_norm, self.run.train.clip_norm)
        self.before_update()
        outcome = dataclasses.replace(outcome, learning_rate=self.optimizer.step())
        self.scale.update(True)
        self._rebalance()
        self.watch.lap("optimizer")
        return outcome

    def gradient(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        first: int = 0,
        aside: Aside = tuple,
        starts: torch.Tensor | None = None,
    ) -> Outcome:
        """Forward and backward. The gradients left in the parameters are of the mean over the world's tokens."""
        scale = self._set_scale(self.scale.value)
        self.sightings.reset()
        for moe in self.moes.values():
            moe.load.zero_()
        counted = (targets != IGNORED).sum() if self.counts_tokens else torch.zeros(())
        losses = self.pipeline.run(*self._micro_batches(tokens, targets, first, starts))
        if self.device.type == "cpu":  # on a GPU nothing has been waited for yet, and reductions overlap
            self.watch.lap("forward_backward")
        self.sightings.losses = losses
        tensor.reduce(gradients(self.partial), self.mesh["tp"].get_group())
        if self.tie is not None:
            self.tie.add(gradients(self._tied()))
        share = losses.sum() if self.counts_loss else torch.zeros_like(losses[0])
        square = numerics.local_square(gradients(self.trained.values()), self.shares)
        total, norm, count, sums = numerics.agree(share, square, counted.to(self.device), aside())
        factor = 1 / (max(count, 1) * scale)  # 1 unless some targets are ignored, or in fp16
        if factor != 1.0 and (scaled := self._gradients()):
            torch._foreach_mul_(scaled, factor)
        return Outcome(total * factor, norm * factor, int(count), aside=sums)

    def evaluate(
        self, tokens: torch.Tensor, targets: torch.Tensor, starts: torch.Tensor | None = None
    ) -> tuple[float, int]:
        """(mean loss, tokens) of the world's [samples, seq], of which each replica gives its share of a step.

        Without dropout. Parameters, gradients and what the next step computes are as if it had not been.
        """
        scale = self._set_scale(1.0)
        for part in self.parts:
            part.eval()
        micro_batches = self._micro_batches(tokens, targets, 0, starts)
        losses = self.pipeline.evaluate(*micro_batches)
        for part in self.parts:
            part.train()
            data.free(part)
        self.sightings.reset()
        counted = (targets != IGNORED).sum() if self.counts_tokens else torch.zeros((), device=self.device)
        share = losses.sum() if self.counts_loss else torch.zeros_like(losses[0])
        total, _, count, _ = numerics.agree(share, torch.zeros_like(share), counted)
        return total / (max(count, 1) * scale), int(count)

    def again(
        self, tokens: torch.Tensor, targets: torch.Tensor, first: int, runs: int, starts: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Forward and backward over [samples, seq] by each replica for itself, in `runs` micro-batches; their losses
        on the last stage. Nothing is left of it."""
        self._set_scale(self.scale.value)
        losses = self.pipeline.run(*self._micro_batches(tokens, targets, first, starts, runs))
        self.optimizer.drop()
        self.sightings.reset()
        return losses if self.counts_loss and self.layout.stages - 1 in self.stages else None

    def _set_scale(self, value: float) -> float:
        """What the sum of losses is multiplied by until the next call."""
        scale = value / self.planned_tokens
        for part in self.parts:
            part.seams.scale = scale
        return scale

    def _micro_batches(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        first: int,
        starts: torch.Tensor | None,
        runs: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, list[Samples]]:
        """[samples, seq] -> [runs, micro-batch, seq] and what is told of the samples of each; empty micro-batches, with
        all targets ignored, come last. `runs`: default as many as the replica has in a step."""
        size, seq = self.layout.micro_batch, tokens.shape[-1]
        if seq > self.run.model.seq_len or (self.parts[0].seams.sharers > 1 and seq % self.layout.tp):
            raise ValueError(f"samples of {seq} tokens: at most {self.run.model.seq_len}, and divisible by tp")
        runs = runs or self.layout.runs(self.run.train.global_batch)[self.replica]
        missing = runs * size - len(tokens)
        numbers = torch.cat((torch.arange(first, first + len(tokens)), torch.full((missing,), NOBODY)))

        def shaped(given: torch.Tensor, filler: int) -> torch.Tensor:
            whole = torch.cat((given, given.new_full((missing, seq), filler)))
            return whole.view(-1, size, seq).to(self.device, non_blocking=True)

        each = numbers.view(-1, size).to(self.device, non_blocking=True).unbind()
        documents = (None,) * runs if starts is None else shaped(starts, 0).unbind()
        samples = [Samples(*told) for told in zip(each, documents, strict=True)]
        return shaped(tokens, 0), shaped(targets, IGNORED), samples

    def _gradients(self) -> list[torch.Tensor]:
        return gradients([*self.named.values(), *self.copies.values()])

    def _rebalance(self) -> None:
        """By how many tokens each expert of each layer got in this step, of all ranks."""
        if self.moes:
            load = torch.stack([moe.load for moe in self.moes.values()])
            dist.all_reduce(load, group=self.stage)
            for moe, own in zip(self.moes.values(), load, strict=True):
                moe.rebalance(own)

    def drifted(self) -> list[str]:
        """Names of what should be equal on several ranks and is not, as far as this rank can see."""
        found = numerics.drifted(self._state({**self.copies, **self.named}))
        if self.tie is not None and not self.tie.equal([local(one.detach()) for one in self._tied()]):
            found.append("model.embedding.weight")
        return found

    def _tied(self) -> list[nn.Parameter]:
        """What this rank has of a tied embedding."""
        return [p for p in (self.named.get("embedding.weight"), *self.copies.values()) if p is not None]

    def gradients(self) -> State:
        """What `gradient` left, by name of the parameter."""
        found = {name: parameter.grad for name, parameter in self.named.items()}
        return {name: self._placed(name, grad) for name, grad in found.items() if grad is not None}

    def state(self) -> State:
        """Every tensor of the training state that this rank owns, by logical name: DTensors on the (dp, tp) mesh.

        Always the same ones, which training changes in place.
        """
        if self.owned is None:
            self.owned = self._state(self._kept(self.named))
        return self.owned

    def _kept(self, named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """What a checkpoint has: of an adapted model the adapters alone, since the rest is where it came from."""
        return {n: p for n, p in named.items() if lora.adapted(n)} if self.run.model.lora else named

    def progress(self) -> dict[str, Any]:
        """The rest of the training state: the same in any layout."""
        optimizer = {"name": self.run.train.optimizer, "steps": self.optimizer.steps}
        return {"optimizer": optimizer, "scaler": self.scale.state()}

    def restore(self, fill: Callable[[State], None], progress: Mapping[str, Any]) -> None:
        """Continue at `progress`: `fill` fills tensors by logical name, copies of other stages' tensors too."""
        self._fill(fill, self.state(), self._state(self._kept(self.copies)))
        self.optimizer.resume(int(progress["optimizer"]["steps"]))
        self.scale.resume(progress.get("scaler", {}))

    def begin(self, fill: Callable[[State], None]) -> None:
        """`fill` fills the whole model, also what a checkpoint has not."""
        self._fill(fill, self._state(self.named), self._state(self.copies))

    def _fill(self, fill: Callable[[State], None], own: State, copies: State) -> None:
        fill({**copies, **own})
        for name, copy in copies.items():
            if name in own:
                copy.copy_(own[name])

    def _check_names(self) -> None:
        if freeze := self.run.train.freeze:
            with torch.device("meta"):
                frozen.check(dict(registry.part(self.run.model, self.vocabulary).named_parameters()), freeze)

    def _state(self, named: Mapping[str, nn.Parameter]) -> State:
        tensors = {f"model.{name}": self._placed(name, parameter.detach()) for name, parameter in named.items()}
        for slot, name, value in self.optimizer.state(named):
            tensors[f"optimizer.{slot}.{name}"] = self._placed(name, value)
        for name, moe in self.moes.items():
            tensors[f"model.{name}.router.balance"] = self._placed("", moe.router.balance)
        return tensors

    def _placed(self, name: str, tensor: torch.Tensor) -> DTensor:
        """What ranks hold of a tensor cut as the parameter called `name`."""
        if self.experts_spread is not None and dimension(self.rules, name, "ep") is not None:
            return placed(tensor, self.cuts[name], self.experts_spread)
        return placed(tensor, self.cuts.get(name), self.spread)

    def slices(self, state: State) -> dict[str, int]:
        """The dimension along which each tensor is stored in tiles."""
        return {name: sliced(self.rules, name) for name in state}
