"""A layout whose replicas stand on several kinds of GPU, where none of them has room for all.

It must fit the memory of the smallest one. Each replica gets micro-batches by the speed that the cost model gives this
layout on its kind, and the step lasts as long as on the kind that is last to finish. What links two kinds is taken to
be no slower than the slowest of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from service.contracts.cluster import Fleet
from service.contracts.errors import PlacementRefused
from service.contracts.job import PlacementPolicy
from service.core import placement
from service.core.plan import layout as layouts
from service.core.plan import ranking, reasons
from service.core.plan.cost import Estimate
from service.core.plan.kinds import Kind
from service.core.plan.ranking import Plan
from workers.models.spec import ModelSpec
from workers.spec import ParallelLayout, TrainSpec

TRIED = 12  # of the fastest on the smallest kind that can be placed


@dataclasses.dataclass(frozen=True, slots=True)
class Mixed:
    plan: Plan
    speeds: Mapping[str, float]  # FLOP/s of one GPU of each kind
    reason: str


@functools.lru_cache(maxsize=64)
def best(
    model: ModelSpec, train: TrainSpec, policy: PlacementPolicy, slots: int, kinds: tuple[Kind, ...]
) -> Mixed | None:
    """None where no layout fits, or none can be placed."""
    found: list[Mixed] = []
    for plan in ranking.every(model, train, smallest(kinds).cluster(slots, policy)):
        if one := _placed(plan.layout, model, train, policy, kinds):
            found.append(one)
            if len(found) == TRIED:
                break
    return min(found, key=lambda one: one.plan.estimate.step_s, default=None)


def smallest(kinds: Sequence[Kind]) -> Kind:
    """By memory."""
    return min(kinds, key=lambda kind: (kind.gpu.memory, kind.gpu.peak))


def _placed(
    layout: ParallelLayout, model: ModelSpec, train: TrainSpec, policy: PlacementPolicy, kinds: Sequence[Kind]
) -> Mixed | None:
    each = {
        kind.name: ranking.estimate(layout, model, train, kind.cluster(layout.world, policy)).estimate for kind in kinds
    }
    speeds = {name: speed(estimate) for name, estimate in each.items()}
    on = _kinds(layout, policy, kinds, speeds)
    if on is None:
        return None
    fastest = max(speeds[name] for name in on)
    weights = tuple(round(speeds[name] / fastest, 3) for name in on)
    weighted = ParallelLayout.model_validate(layout.model_dump() | {"replica_weights": weights})
    made = weighted if len(set(weights)) > 1 else layout
    runs = made.runs(train.global_batch)
    used = [kind for kind in kinds if kind.name in on]
    steps = {}
    for kind in used:
        most = max(count for count, name in zip(runs, on, strict=True) if name == kind.name)
        seen = dataclasses.replace(layouts.of(layout, model, train.global_batch), accumulation=most)
        steps[kind.name] = ranking.estimating(model, train, kind.cluster(layout.world, policy)).estimate(seen)
    last = max(steps.values(), key=lambda estimate: estimate.step_s)
    peaks = {kind.name: kind.gpu.peak for kind in used}
    estimate = dataclasses.replace(last, peak=sum(peaks[name] for name in on) / len(on))
    shares = {
        name: (on.count(name), sum(count for count, own in zip(runs, on, strict=True) if own == name)) for name in steps
    }
    return Mixed(Plan(made, estimate), speeds, reasons.mixed(made, estimate, shares))


def speed(estimate: Estimate) -> float:
    """FLOP/s of one GPU."""
    return estimate.flops / estimate.step_s / estimate.gpus


def _kinds(
    layout: ParallelLayout, policy: PlacementPolicy, kinds: Sequence[Kind], speeds: Mapping[str, float]
) -> tuple[str, ...] | None:
    """The kind that each replica stands on in the empty fleet; None where it can't be placed."""
    names = {node.id: kind.name for kind in kinds for node in kind.fleet.nodes}
    fleet = Fleet(tuple(node for kind in kinds for node in kind.fleet.nodes))
    try:
        placed = placement.place(layout, fleet, frozenset(), policy, kinds[0].device, speeds)
    except PlacementRefused:
        return None
    return tuple(names[placed.slots[dp * layout.tp].node] for dp in range(layout.dp))
