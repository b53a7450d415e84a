"""Every layout that the engine runs for a model, a batch and a number of devices, the fastest first.

Of choices that only save memory (recomputation, parameters sharded too) the cheapest that fits is taken; the rest is
tried out. Knows the cost model; knows no fleet and no placement.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from service.core.plan import layout as layouts
from service.core.plan import shape
from service.core.plan.cluster import Cluster
from service.core.plan.cost import Estimate, Estimator
from service.core.plan.snapshot import STATE_BYTES
from service.core.plan.stack import OWN, OWN_COMPILED, Stack
from service.core.plan.stages import Held
from workers.models.spec import ModelSpec, divisors
from workers.spec import ParallelLayout, Recompute, Schedule, TrainSpec, layout_problem

MICRO_BATCHES = (1, 2, 4, 8)
MOST_STAGES = 16  # of one pipeline rank
DEEPEST = 256  # pipeline ranks: beyond what anyone has run, and a bound on what a strange model can cost
MOST_WEIGHED = 1000  # layers that stages are cut by weight from, for the same reason
MOST_TRIED = 10_000  # choices: DeepSeek-V3 on 2,048 GPUs has about 2,000
MOST_DEVICES = 1_000_000  # that a job may ask for
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "inner", "full")  # from the cheapest to the dearest


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    layout: ParallelLayout
    estimate: Estimate


def ranked(model: ModelSpec, train: TrainSpec, cluster: Cluster, count: int = 4) -> tuple[Plan, ...]:
    """The best `count` layouts of all of the cluster's devices that fit their memory; none where none does."""
    return tuple(every(model, train, cluster)[:count])


def every(model: ModelSpec, train: TrainSpec, cluster: Cluster) -> list[Plan]:
    """All that fit, the fastest first; of equally fast ones the one found first, of a smaller tp and pp.

    Of more choices than a caller can wait for, every second or third or so is tried.
    """
    estimator = estimating(model, train, cluster)
    sizes = _sizes(model, train, cluster)
    choices = [choice for one in sizes for choice in _choices(one, model, train, estimator)]
    tried = choices[:: -(-len(choices) // MOST_TRIED) or 1]
    plans = (_lightest(choice, estimator, model) for choice in tried)
    found = [plan for plan in plans if plan is not None]
    return sorted(found, key=lambda plan: plan.estimate.step_s)


def estimating(model: ModelSpec, train: TrainSpec, cluster: Cluster) -> Estimator:
    """Of this engine, as the job sets it."""
    return Estimator(shape.of(model), train.global_batch, cluster, stack(train), train.precision, counted="nvidia-smi")


def stack(train: TrainSpec) -> Stack:
    own = OWN_COMPILED if train.compile else OWN
    return dataclasses.replace(own, reduce_bytes=2) if train.reduce_dtype == "bf16" else own


def estimate(layout: ParallelLayout, model: ModelSpec, train: TrainSpec, cluster: Cluster) -> Plan:
    """Of one layout, whether or not it fits."""
    return Plan(layout, estimating(model, train, cluster).estimate(layouts.of(layout, model, train.global_batch)))


def leanest(model: ModelSpec, train: TrainSpec, cluster: Cluster) -> tuple[ParallelLayout, float] | None:
    """The layout of all devices whose fullest one holds the least, and those bytes; None where none is legal. Experts
    are on all ranks or on as many as can be."""
    estimator = estimating(model, train, cluster)
    best: tuple[ParallelLayout, float] | None = None
    for _, alike in itertools.groupby(_sizes(model, train, cluster), key=lambda sizes: (sizes.tp, sizes.pp)):
        first, *others = alike
        for sizes, zero in itertools.product((first, *others[-1:]), (1, 3)):
            made = sizes.model_copy(update={"zero": zero, "recompute": "full"})
            seen = layouts.of(made, model, train.global_batch)
            most = max(rank.total for rank in estimator.memory(seen))
            if best is None or most < best[1]:
                best = (made, most)
    return best


def enough(model: ModelSpec, train: TrainSpec, cluster: Cluster) -> int | None:
    """More devices than the cluster has, in whole nodes, on which a layout fits: the fewest, to an eighth. None where
    64 times as many, or a million, are not enough."""
    unit = cluster.gpus_per_node
    estimator = estimating(model, train, cluster)
    least = STATE_BYTES * estimator.shape.parameters / estimator.limit
    for below in (cluster.gpus * 2**power for power in range(6)):
        step = max(unit, below // 8 // unit * unit)
        for count in range((below // unit + 1) * unit, 2 * below + 1, step):
            if least < count <= MOST_DEVICES:
                lean = leanest(model, train, dataclasses.replace(cluster, gpus=count))
                if lean is not None and lean[1] <= estimator.limit:
                    return count
    return None


def _sizes(model: ModelSpec, train: TrainSpec, cluster: Cluster) -> Iterator[ParallelLayout]:
    """dp, pp, tp and ep that use all devices, tp inside an NVLink domain."""
    world = cluster.gpus
    for tp in divisors(model.heads, min(world, cluster.domain)):
        if world % tp:
            continue
        for pp in divisors(world // tp, min(model.layers, DEEPEST)):
            dp = world // tp // pp
            if train.global_batch // dp < pp:
                continue  # fewer micro-batches than stages leave the pipeline empty
            for ep in divisors(model.experts.count, dp * tp) if model.experts else (1,):
                if (dp * tp) % ep == 0:
                    layout = ParallelLayout(dp=dp, pp=pp, tp=tp, ep=ep)
                    if layout_problem(layout, model, train) is None:
                        yield layout


def _choices(
    sizes: ParallelLayout, model: ModelSpec, train: TrainSpec, estimator: Estimator
) -> Iterator[ParallelLayout]:
    """Micro-batch, schedule, and how layers are cut into stages."""
    for micro_batch in MICRO_BATCHES:
        total = train.global_batch // micro_batch
        if train.global_batch % micro_batch or total // sizes.dp < sizes.pp:
            continue
        for schedule, vpp in _schedules(sizes.pp, model.layers):
            made = sizes.model_copy(update={"micro_batch": micro_batch, "schedule": schedule, "vpp": vpp})
            if layout_problem(made, model, train) is not None:
                continue
            yield made
            if schedule == "zbv" or model.layers > MOST_WEIGHED:
                continue
            weighed = made.model_copy(update={"stage_layers": "weighed"})
            if _held(weighed, model, estimator) != _held(made, model, estimator):
                yield weighed


def _held(layout: ParallelLayout, model: ModelSpec, estimator: Estimator) -> tuple[Held, ...]:
    return estimator.held(layouts.of(layout, model, estimator.global_batch))


def _schedules(pp: int, layers: int) -> Iterator[tuple[Schedule, int]]:
    yield "1f1b", 1
    if pp == 1:
        return
    for vpp in range(2, min(MOST_STAGES, layers // pp) + 1):
        if -(-layers // (pp * vpp)) * pp * vpp - layers < pp:  # at most one stage a rank is short of a layer
            yield "interleaved_1f1b", vpp
    if 2 * pp <= layers:
        yield "zbv", 2


def _lightest(layout: ParallelLayout, estimator: Estimator, model: ModelSpec) -> Plan | None:
    """With the least that makes it fit."""
    best: Plan | None = None
    for zero in (1, 3):
        if zero > 1 and (layout.dp == 1 or layout.schedule == "zbv"):
            continue
        for recompute in RECOMPUTE:
            if recompute == "selective" and layout.schedule == "zbv":
                continue
            made = layout.model_copy(update={"zero": zero, "recompute": recompute})
            seen = layouts.of(made, model, estimator.global_batch)
            held = estimator.memory(seen)
            if not estimator.fits(held):
                if max(rank.total - rank.activations - rank.logits for rank in held) > estimator.limit:
                    break  # no recomputation helps
                continue
            plan = Plan(made, estimator.estimate(seen))
            if best is None or plan.estimate.step_s < best.estimate.step_s:
                best = plan
            if recompute == "none" and zero == 1:
                return best
            break
    return best
