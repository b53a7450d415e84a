"""What a layout costs: seconds of a step and bytes by stage. The one entrance of the cost model.

An `Estimator` is made once for a model, batch and cluster. `estimate(layout)` is then cheap, since what layers cost is
kept for all layouts that share it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from service.core.plan import kernels, layer, memory, network, schedule, stages
from service.core.plan.cluster import Cluster
from service.core.plan.layer import KINDS, Passes, Rank
from service.core.plan.layout import Layout
from service.core.plan.memory import Bytes, Kept
from service.core.plan.schedule import Times
from service.core.plan.shape import Shape
from service.core.plan.stack import OWN, Kind, Stack
from service.core.plan.stages import Held

UPDATE_BYTES = 38
"""Memory traffic of a parameter's update: the gradient twice, fp32 copy and two moments there and back, the weight."""

USABLE = 0.96
"""Share of a device's memory that an allocator fills before fragments stop it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Of one step. `parts` are seconds of a mean rank that sum to `step_s`; `memory` is by pipeline rank."""

    step_s: float
    parts: dict[str, float]
    memory: tuple[Bytes, ...]
    bubble: float  # share of the step that ranks wait for each other in the pipeline
    flops: float  # model FLOPs of the step, all scores counted
    tokens: float  # of the step
    gpus: int
    peak: float  # FLOP/s of one GPU
    fits: bool

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def mfu(self) -> float:
        return self.flops / self.step_s / self.gpus / self.peak

    @property
    def memory_bytes(self) -> float:
        """Of the fullest rank."""
        return max(stage.total for stage in self.memory)

    def days(self, tokens: float) -> float:
        return tokens / self.tokens_per_s / 86400

    def gpu_hours(self, tokens: float) -> float:
        return self.days(tokens) * 24 * self.gpus


@dataclasses.dataclass(frozen=True, slots=True)
class _Cost:
    """Seconds of one layer, embedding or head: of each pass, and of all by kind."""

    forward: float
    inputs: float
    weights: float
    again: float
    kinds: tuple[float, ...]

    @classmethod
    def of(cls, passes: Passes) -> _Cost:
        kinds = zip(passes.forward.by_kind, passes.inputs.by_kind, passes.weights.by_kind, strict=True)
        return cls(
            passes.forward.seconds,
            passes.inputs.seconds,
            passes.weights.seconds,
            passes.again.seconds,
            tuple(map(sum, kinds)),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Layers:
    """What is shared by layouts that cut layers alike."""

    dense: _Cost
    sparse: _Cost
    embedding: _Cost
    head: _Cost
    kept: Kept


class Estimator:
    """For one model, batch and cluster. `precision` is that of products: bf16, fp16, fp8, fp32 or float64."""

    def __init__(
        self, shape: Shape, global_batch: int, cluster: Cluster, stack: Stack = OWN, precision: str = "bf16",
        counted: Kind = "nvidia-smi",
    ) -> None:  # fmt: skip
        self.shape, self.global_batch, self.cluster, self.stack = shape, global_batch, cluster, stack
        self.counted: Kind = "allocator" if cluster.gpu.family == "cpu" else counted
        self.device = kernels.device(cluster.gpu, stack, precision)
        self.peak = cluster.gpu.peak_fp8 if precision == "fp8" and cluster.gpu.peak_fp8 else cluster.gpu.peak
        self.tokens = float(global_batch * shape.seq_len)
        self.flops = shape.flops() * self.tokens
        self.limit = cluster.gpu.memory * USABLE
        own = 6.0 * shape.head
        self.head_layers = own * shape.layers / (shape.flops() - own)  # as the engine weighs it
        self._layers: dict[tuple[object, ...], _Layers] = {}

    def held(self, layout: Layout) -> tuple[Held, ...]:
        """What each pipeline rank has."""
        return stages.held(layout, self.shape.layers, self.shape.dense_layers, self.head_layers)

    def memory(self, layout: Layout) -> tuple[Bytes, ...]:
        """By pipeline rank; much cheaper than an estimate, for layouts that don't fit."""
        everyone = self.held(layout)
        return self._memory(layout, everyone, self._elements(layout, everyone), self._costs(layout).kept)

    def fits(self, held: Iterable[Bytes]) -> bool:
        return max(stage.total for stage in held) <= self.limit

    def estimate(self, layout: Layout) -> Estimate:
        count = layout.micro_batches(self.global_batch)
        everyone = self.held(layout)
        elements = self._elements(layout, everyone)
        costs = self._costs(layout)
        known = {held: self._times(layout, costs, held, elements[held]) for held in elements}
        times = [known[held] for held in everyone]
        totals = [each.total for each in times]
        slowest, mean = max(totals), sum(totals) / layout.pp
        waiting = schedule.waiting_s(layout, times, count)
        reducing, updating = self._end_s(layout, everyone, elements, times)
        parts = self._work(layout, costs, mean, count)
        parts["uneven"] = (slowest - mean) * count
        parts["bubble"] = waiting
        parts["pp"] = self._sending_s(layout, count)
        parts["dp"] = reducing
        parts["optimizer"] = updating
        parts["host"] = self.stack.step_s
        if self.stack.scale != 1:
            parts = {name: seconds * self.stack.scale for name, seconds in parts.items()}
        step = sum(parts.values())
        held = self._memory(layout, everyone, elements, costs.kept)
        return Estimate(
            step_s=step,
            parts=parts,
            memory=held,
            bubble=(parts["bubble"] + parts["uneven"]) / step,
            flops=self.flops,
            tokens=self.tokens,
            gpus=layout.world,
            peak=self.peak,
            fits=self.fits(held),
        )

    def _costs(self, layout: Layout) -> _Layers:
        key = (
            layout.tp, layout.cp, layout.ep, layout.expert_tp, layout.micro_batch, layout.sequence_parallel,
            layout.recompute, layout.recompute_share, layout.schedule == "dualpipe",
        )  # fmt: skip
        if (known := self._layers.get(key)) is None:
            tokens = layout.micro_batch * self.shape.seq_len / layout.cp
            tp = network.bus(self.cluster, self.stack, layout.tp, 1)
            rank = Rank(self.shape, layout, self.device, self.cluster, tp, tokens)
            sparse = layer.layer(rank, True) if self.shape.experts else Passes()
            known = _Layers(
                dense=_Cost.of(layer.layer(rank, False)),
                sparse=_Cost.of(sparse),
                embedding=_Cost.of(layer.embedding(rank)),
                head=_Cost.of(layer.head(rank)),
                kept=memory.kept(self.shape, layout, self.stack),
            )
            self._layers[key] = known
        return known

    def _elements(self, layout: Layout, everyone: tuple[Held, ...]) -> dict[Held, tuple[float, float]]:
        return {held: memory.parameters(self.shape, layout, held) for held in dict.fromkeys(everyone)}

    def _memory(
        self, layout: Layout, everyone: tuple[Held, ...], elements: dict[Held, tuple[float, float]], per: Kept
    ) -> tuple[Bytes, ...]:
        count = layout.micro_batches(self.global_batch)
        return tuple(
            memory.rank(
                self.shape, layout, self.stack, held, elements[held], per,
                schedule.in_flight(layout, number, count), self.counted,
            )
            for number, held in enumerate(everyone)
        )  # fmt: skip

    def _times(self, layout: Layout, costs: _Layers, held: Held, elements: tuple[float, float]) -> Times:
        """Of a micro-batch on a rank."""
        forward = inputs = weights = again = 0.0
        many = (held.dense, held.sparse, held.first, held.last)
        for one, cost in zip(many, (costs.dense, costs.sparse, costs.embedding, costs.head), strict=True):
            if one:
                forward += one * cost.forward
                inputs += one * cost.inputs
                weights += one * cost.weights
                again += one * cost.again
        weights += self.device.move_s(sum(elements) * self.stack.accumulate_bytes)
        if layout.zero > 1:
            extra = self._sharding(layout, sum(elements), forward, inputs + weights)
            forward, inputs = forward + extra[0], inputs + extra[1]
        return Times(forward, inputs + again, weights)

    def _work(self, layout: Layout, costs: _Layers, mean: float, count: int) -> dict[str, float]:
        """Of a mean rank, by kind. Gradients added up count as memory, exposed sharding as dp traffic of the passes."""
        shape = self.shape
        many = (shape.dense_layers, shape.layers - shape.dense_layers, 1, 1)
        each = (costs.dense, costs.sparse, costs.embedding, costs.head)
        share = count / layout.pp
        parts = {
            kind: share * sum(one * cost.kinds[place] for one, cost in zip(many, each, strict=True))
            for place, kind in enumerate(KINDS)
        }
        parts["recompute"] = share * sum(one * cost.again for one, cost in zip(many, each, strict=True))
        parts["accumulation"] = max(0.0, mean * count - sum(parts.values()))
        return parts

    def _sharding(self, layout: Layout, elements: float, forward: float, backward: float) -> tuple[float, float]:
        """What zero 2 and 3 add to a micro-batch's passes, where it can't hide."""
        shared = network.bus(self.cluster, self.stack, layout.dp * layout.cp // layout.replicate, layout.tp)
        scattered = shared.all_gather_s(elements * self.stack.reduce_bytes)
        hidden = self.stack.dp_hidden
        if layout.zero == 2:
            return 0.0, max(0.0, scattered - hidden * backward)
        gathered = shared.all_gather_s(elements * self.stack.weight_bytes)
        return max(0.0, gathered - hidden * forward), max(0.0, gathered + scattered - hidden * backward)

    def _sending_s(self, layout: Layout, count: int) -> float:
        """Between stages, where it can't hide."""
        if layout.pp == 1:
            return 0.0
        tokens = layout.micro_batch * self.shape.seq_len / layout.cp
        split = layout.tp if layout.sequence_parallel or self.stack.scatter_gather else 1
        stride = layout.tp * layout.cp * layout.dp
        one = network.send_s(self.cluster, self.stack, 2 * tokens * self.shape.hidden / split, stride)
        steady, ends = schedule.sends(layout, count)
        return one * (steady * (1 - self.stack.pp_hidden) + ends)

    def _end_s(
        self, layout: Layout, everyone: tuple[Held, ...], elements: dict[Held, tuple[float, float]], times: list[Times]
    ) -> tuple[float, float]:
        """Gradients reduced and weights gathered where they can't hide, and the optimizer's update.

        A late stage is done before the first one, and reduces while that still works.
        """
        stack, size = self.stack, layout.dp * layout.cp
        shared = network.bus(self.cluster, stack, size, layout.tp)
        shards = size / layout.replicate if layout.zero else 1
        most = max(sum(held) for held in elements.values())
        updating = self.device.move_s(most / shards * UPDATE_BYTES)
        reducing = 0.0
        if size > 1 and layout.zero <= 1:
            gathered = stack.weight_bytes if layout.zero else stack.reduce_bytes
            for number, (held, each) in enumerate(zip(everyone, times, strict=True)):
                own = sum(elements[held])
                backward = each.inputs + each.weights
                lead = 0.0 if layout.schedule == "zb2" else number * backward / layout.vpp
                after = max(0.0, shared.all_gather_s(own * stack.reduce_bytes) - lead - stack.dp_hidden * backward)
                before = max(0.0, shared.all_gather_s(own * gathered) - stack.dp_hidden * each.forward)
                reducing = max(reducing, after + before)
        if self.shape.tied and layout.pp > 1:
            bytes_ = self.shape.vocab * self.shape.hidden / layout.tp * stack.reduce_bytes
            reducing += network.send_s(self.cluster, stack, bytes_, layout.tp * size)
        return reducing, updating


def estimate(
    shape: Shape, layout: Layout, global_batch: int, cluster: Cluster, stack: Stack = OWN, precision: str = "bf16"
) -> Estimate:
    """One layout. For many of one job, keep an `Estimator`."""
    return Estimator(shape, global_batch, cluster, stack, precision).estimate(layout)
