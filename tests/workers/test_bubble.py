"""The bubble of theory is that of torch's own orders of passes, each pass taking one unit of time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bench.bubble import Asleep, loss
from tests.pool import Pool
from workers import bubble
from workers.parallel import mesh, pipeline
from workers.spec import ParallelLayout

pytestmark = pytest.mark.torch

Pass = tuple[int, str, int]  # stage, kind, micro-batch
UNITS = {"FORWARD": 1, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1, "FULL_BACKWARD": 2}


@pytest.mark.parametrize(
    ("layout", "micro_batches", "expected"),
    [
        ({}, 5, 0.0),
        ({"pp": 4}, 4, 3 / 7),
        ({"pp": 4}, 32, 3 / 35),
        ({"pp": 4, "schedule": "gpipe"}, 4, 3 / 7),
        ({"pp": 4, "vpp": 2, "schedule": "interleaved_1f1b"}, 4, 3 / 11),
        ({"pp": 4, "vpp": 2, "schedule": "interleaved_zb"}, 4, 3 / 27),
        ({"pp": 4, "vpp": 2, "schedule": "zbv"}, 7, 0.0),
    ],
    ids=str,
)
def test_the_formulas(layout: dict[str, object], micro_batches: int, expected: float) -> None:
    assert bubble.fraction(ParallelLayout.model_validate(layout), micro_batches) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "counts"),
    [
        ("interleaved_1f1b", 4, 2, (4, 8, 16)),
        ("interleaved_1f1b", 2, 3, (2, 6)),
        ("interleaved_zb", 4, 2, (4, 8, 16)),
        ("interleaved_zb", 2, 3, (2, 6)),
        ("zbv", 4, 2, (1, 4, 5, 6, 7, 16)),
        ("zbv", 3, 2, (2, 4, 5, 9)),
    ],
)
def test_the_formulas_are_what_torch_s_orders_take(
    pool: Pool, schedule: str, pp: int, vpp: int, counts: tuple[int, ...]
) -> None:
    layout = ParallelLayout.model_validate({"pp": pp, "vpp": vpp, "schedule": schedule})
    orders = pool.run(pp, ordered, layout, counts)[0]
    for count, order in zip(counts, orders, strict=True):
        assert waited(order, layout) == pytest.approx(bubble.fraction(layout, count)), count


def ordered(store: dist.Store, rank: int, layout: ParallelLayout, counts: tuple[int, ...]) -> list[list[list[Pass]]]:
    """For each number of micro-batches: the passes of each rank in their order."""
    with mesh.joined(store, rank, layout, "cpu", 60.0) as axes:
        shapes = pipeline.Shapes(1, 1, 8, 8, torch.float32)
        orders = []
        for count in counts:
            parts = [Asleep(0.0, first=stage == 0) for stage in pipeline.stages_of(rank, layout)]
            staged = pipeline.Staged(parts, loss, layout, shapes, axes["pp"], torch.device("cpu"))
            by_rank = staged._schedule(count, 4).pipeline_order
            orders.append([
                [(one.stage_index, one.computation_type.name, one.microbatch_index) for one in by_rank[each] if one]
                for each in range(layout.pp)
            ])  # fmt: skip
        return orders


def waited(order: list[list[Pass]], layout: ParallelLayout) -> float:
    """The share of waiting on the rank that takes longest, when a pass begins as soon as it can."""
    done: dict[tuple[int, bool, int], int] = {}  # (stage, forward, micro-batch) -> when
    queues, clocks, begins = [list(passes) for passes in order], [0] * len(order), [-1] * len(order)
    while any(queues):
        ready = [
            rank for rank, queue in enumerate(queues) if queue and all(one in done for one in needs(queue[0], layout))
        ]
        assert ready, "the order deadlocks"
        for rank in ready:
            stage, kind, micro_batch = one = queues[rank].pop(0)
            begin = max([clocks[rank], *(done[before] for before in needs(one, layout))])
            clocks[rank] = begin + UNITS[kind]
            begins[rank] = begin if begins[rank] < 0 else begins[rank]
            if kind != "BACKWARD_WEIGHT":
                done[stage, kind == "FORWARD", micro_batch] = clocks[rank]
    longest, rank = max((clocks[rank] - begins[rank], rank) for rank in range(len(order)))
    return 1 - sum(UNITS[kind] for _, kind, _ in order[rank]) / longest


def needs(one: Pass, layout: ParallelLayout) -> list[tuple[int, bool, int]]:
    stage, kind, micro_batch = one
    if kind == "BACKWARD_WEIGHT":
        return []
    if kind == "FORWARD":
        return [(stage - 1, True, micro_batch)] if stage else []
    after = [(stage + 1, False, micro_batch)] if stage < layout.stages - 1 else []
    return [(stage, True, micro_batch), *after]
