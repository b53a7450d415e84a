"""Which stage has which layers, and which pipeline rank has which stages: as the engine cuts them."""

from __future__ import annotations

import dataclasses
import functools

from service.core.plan.layout import Layout


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What a pipeline rank has."""

    dense: int
    sparse: int  # layers with experts
    first: bool  # the embedding
    last: bool  # the head


def held(layout: Layout, layers: int, dense_layers: int, head: float) -> tuple[Held, ...]:
    """By pipeline rank. `head`: what the head costs, in layers."""
    folded = layout.schedule in ("zbv", "dualpipe")
    return _held(layout.pp, layout.vpp, folded, layout.stage_layers, layers, dense_layers, head)


@functools.lru_cache(maxsize=4096)
def _held(
    pp: int, vpp: int, folded: bool, named: object, layers: int, dense_layers: int, head: float
) -> tuple[Held, ...]:
    stages = pp * vpp
    sizes = named if isinstance(named, tuple) else _even(layers, stages, head if named == "weighed" else 0.0)
    dense, sparse = [0] * pp, [0] * pp
    start = 0
    for stage, size in enumerate(sizes):
        turn = stage // pp % 2 and folded
        rank = pp - 1 - stage % pp if turn else stage % pp
        here = max(0, min(size, dense_layers - start))
        dense[rank] += here
        sparse[rank] += size - here
        start += size
    end = 0 if folded and vpp % 2 == 0 else pp - 1
    return tuple(Held(dense[rank], sparse[rank], rank == 0, rank == end) for rank in range(pp))


def _even(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Earlier stages take what doesn't divide; with `head`, a layer goes where least is."""
    if head <= 0:
        return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
    sizes, costs = [0] * stages, [0.0] * stages
    costs[-1] = head
    for _ in range(layers):
        least = costs.index(min(costs))
        sizes[least], costs[least] = sizes[least] + 1, costs[least] + 1
    return tuple(sizes)
