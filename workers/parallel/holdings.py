"""What each rank of a layout holds of the training state, from the run alone: no process group, no memory, no engine.

The model is built without storage and cut by the axes' own rules, so that what is said here is what an engine does:
names, shapes, boxes, stored order, and which rank keeps what. For plans of checkpoints that no machine here could hold.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from workers import flops
from workers.checkpoint import boxes
from workers.checkpoint.boxes import Box, Wanted
from workers.models import lora, registry
from workers.models.moe import MixtureOfExperts
from workers.models.sharding import dimension, sliced
from workers.optimizer import Optimizer
from workers.parallel import expert, pipeline, tensor
from workers.parallel.precision import PARAMETERS
from workers.spec import RunSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A rank's part of a logical tensor."""

    shape: tuple[int, ...]  # of the whole
    dtype: str
    slice: int  # the dimension along which it is stored in tiles
    box: Box

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.shape, self.dtype, self.box)


@dataclasses.dataclass(frozen=True, slots=True)
class Logical:
    """A logical tensor, and how the ranks of its stage divide it."""

    shape: tuple[int, ...]
    dtype: str
    slice: int
    dim: int | None  # cut by tp, or of experts by ep
    of_experts: bool
    sharded: bool = True  # over the replicas too


class Axis:
    """What cutting asks of a one-dimensional mesh: its size. It is that of the first rank, and sends nothing."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def get_local_rank(self) -> int:
        return 0

    def get_group(self) -> None:
        return None


class Holdings:
    """Of a run; `vocabulary` is the tokenizer's size, where the model names none."""

    def __init__(self, run: RunSpec, vocabulary: int = 0) -> None:
        self.run, self.layout = run, run.parallel
        self.vocabulary = run.model.vocab_size or vocabulary
        self._stage = functools.cache(self._of_stage)

    def of(self, rank: int) -> dict[str, Held]:
        """By name, what `Engine.state` has on this rank."""
        own, _ = self._stages(rank)
        return {name: self._held(one, rank) for name, one in own.items()}

    def filled(self, rank: int) -> dict[str, Held]:
        """By name, what `Engine.restore` fills on this rank: its copies of other stages' tensors as well."""
        own, copies = self._stages(rank)
        return {name: self._held(one, rank) for name, one in {**copies, **own}.items()}

    def _stages(self, rank: int) -> tuple[dict[str, Logical], dict[str, Logical]]:
        own: dict[str, Logical] = {}
        copies: dict[str, Logical] = {}
        for stage in pipeline.stages_of(self.layout.coordinates(rank)[0], self.layout):
            mine, others = self._stage(stage)
            own |= mine
            copies |= others
        return own, copies

    def _held(self, one: Logical, rank: int) -> Held:
        layout = self.layout
        _, dp, tp = layout.coordinates(rank)
        shards = layout.dp // layout.replicate
        copy, shard = divmod(dp, shards)
        parts, part = layout.tp, tp
        if one.of_experts:
            shards, parts = shards * layout.tp // layout.ep, layout.ep
            shard, part = divmod(shard * layout.tp + tp, layout.ep)
        cuts = [(one.dim, parts, part)] if one.dim is not None else []
        cuts += [(0, shards, shard)] if one.sharded else []
        kept = copy == 0 and (one.dim is not None or part == 0) and (one.sharded or shard == 0)
        return Held(one.shape, one.dtype, one.slice, Box(*boxes.cut(one.shape, cuts), kept))

    def _of_stage(self, stage: int) -> tuple[dict[str, Logical], dict[str, Logical]]:
        """Names that the stage owns, and copies of what another one owns."""
        run, model, layout, rules = self.run, self.run.model, self.layout, registry.rules(self.run.model)
        layers = pipeline.stage_layers(model.layers, layout, flops.head(model, self.vocabulary))
        with torch.device("meta"):
            part = registry.part(
                model, self.vocabulary, run.train.freeze, layers=layers[stage], first=stage == 0,
                last=stage == layout.stages - 1, dtype=PARAMETERS[run.train.precision],
            )  # fmt: skip
        shapes = {name: tuple(parameter.shape) for name, parameter in part.named_parameters()}
        cuts = expert.apply(part, rules, _mesh(layout.ep)) if model.experts else {}
        split = layout.splits_sequence(model.seq_len)
        cuts |= tensor.apply(part, rules, model, self.vocabulary, _mesh(layout.tp), split)
        named = dict(part.named_parameters())
        own: dict[str, Logical] = {}
        copies: dict[str, Logical] = {}
        for slot in ("model", *(f"optimizer.{slot}" for slot in Optimizer(run.train, list(named.values())).slots)):
            for name, parameter in named.items():
                if (model.lora and not lora.adapted(name)) or (slot != "model" and not parameter.requires_grad):
                    continue
                shape, dim = shapes[name], cuts[name].dim if name in cuts else None
                of_experts = dimension(rules, name, "ep") is not None
                into = copies if name == "embedding.weight" and not part.first else own
                into[f"{slot}.{name}"] = Logical(shape, _dtype(parameter), sliced(rules, name), dim, of_experts)
        for name, module in part.named_modules():
            if isinstance(module, MixtureOfExperts) and module.spec.bias_rate:
                balance = module.router.balance
                own[f"model.{name}.router.balance"] = Logical(
                    tuple(balance.shape), _dtype(balance), 0, None, False, sharded=False
                )
        return own, copies


def _mesh(size: int) -> DeviceMesh:
    return cast(DeviceMesh, Axis(size))


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
