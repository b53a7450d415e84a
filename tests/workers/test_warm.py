"""A process that was warmed alone trains to the same bits as one that was not, as that rank or another."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.pool import Pool
from tests.workers import runs
from workers import warm
from workers.parallel import mesh
from workers.spec import RunSpec

pytestmark = pytest.mark.torch

LAYOUTS = [
    {"dp": 2, "pp": 2, "tp": 2},
    {"dp": 4, "zero": 3},
    {"pp": 4},
    {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "tp": 2},
    {"pp": 2, "vpp": 2, "schedule": "zbv", "dp": 2},
]


def warmed(store: dist.Store, rank: int, run: RunSpec, other: int) -> tuple[bool, object]:
    """Warm as rank + `other`, then train."""
    done = warm.warm(run, (rank + other) % run.parallel.world)
    if other:
        mesh.forget_groups()
    return done, runs.steps(store, rank, run, 2)


@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_warming_changes_no_bit(pool: Pool, layout: dict[str, object], other: int) -> None:
    run = runs.spec(layout=layout)
    world = run.parallel.world
    said = pool.run(world, warmed, run, other)
    assert [done for done, _ in said] == [True] * world
    assert [result for _, result in said] == pool.run(world, runs.steps, run, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"layers": 32, "hidden": 4096, "ffn_hidden": 8192}},
        {"train": {"compile": True}},
        {"model": {"experts": {"count": 4, "top_k": 2, "hidden": 16}}},
    ],
    ids=["too large", "compiled", "experts"],
)
def test_what_is_not_warmed(changes: dict[str, object]) -> None:
    assert warm.warm(runs.spec(**changes), 0) is False
