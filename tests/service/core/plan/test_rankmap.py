from __future__ import annotations

import itertools

import pytest

from service.contracts.cluster import Fleet
from service.contracts.job import PlacementPolicy
from service.core import placement
from service.core.plan import rankmap
from service.core.state import Placement, Slot
from tests.service.core import world
from workers.spec import ParallelLayout


def lines(layout: ParallelLayout, fleet: Fleet, taken: frozenset[tuple[str, int]] = frozenset()) -> list[rankmap.Line]:
    placed = placement.place(layout, fleet, taken, PlacementPolicy(), "cpu")
    return list(rankmap.lines(layout, placed, fleet))


@pytest.mark.parametrize(
    ("layout", "fleet", "told"),
    [
        # a replica a rack, all alike
        (ParallelLayout(dp=4, pp=2, tp=2), world.fleet(2, 2, 2, 2),
         ["racks r0-r3: nodes n0-n7: replicas 0-3, pipeline ranks 0-1"]),
        # a pipeline over two racks
        (ParallelLayout(dp=2, pp=4, tp=2), world.fleet(2, 2, 2, 2),
         ["racks r0-r3, 2 by 2: nodes n0-n7: replicas 0-1, pipeline ranks 0-3"]),
        (ParallelLayout(dp=1, pp=4, tp=2), world.fleet(2, 2),
         ["racks r0-r1: nodes n0-n3: replica 0, pipeline ranks 0-3"]),
        # one rack for all, one node of it not needed
        (ParallelLayout(dp=2, tp=2), world.fleet(3), ["rack r0: nodes n0-n1: replicas 0-1, pipeline rank 0"]),
        # racks that differ
        (ParallelLayout(dp=3, pp=2, tp=2), world.fleet(2, 4),
         ["rack r0: nodes n0-n1: replica 0, pipeline ranks 0-1",
          "rack r1: nodes n2-n5: replicas 1-2, pipeline ranks 0-1"]),
        # what racks have left makes a pipeline of its own
        (ParallelLayout(dp=3, pp=2, tp=2), world.fleet(3, 3),
         ["rack r0: nodes n0-n2: replica 0, pipeline ranks 0-1; replica 2, pipeline rank 0",
          "rack r1: nodes n3-n5: replica 1, pipeline ranks 0-1; replica 2, pipeline rank 1"]),
    ],
)  # fmt: skip
def test_told_rack_by_rack(layout: ParallelLayout, fleet: Fleet, told: list[str]) -> None:
    assert [str(line) for line in lines(layout, fleet)] == told


def test_racks_that_share_pipelines_in_different_parts_stay_apart() -> None:
    fleet = world.fleet(1, 1, slots=3)
    first, second = ([Slot(node.id, node.name, index) for index in range(3)] for node in fleet.nodes)
    placed = Placement((first[0], first[1], second[0], first[2], second[1], second[2]))  # ranks by stage, then replica
    assert [str(line) for line in rankmap.lines(ParallelLayout(dp=2, pp=3), placed, fleet)] == [
        "rack r0: nodes n0: replica 0, pipeline rank 0; replica 1, pipeline ranks 0-1",
        "rack r1: nodes n1: replica 0, pipeline ranks 1-2; replica 1, pipeline rank 2",
    ]


@pytest.mark.parametrize("racks", [(4, 3, 3), (2, 2, 2, 2, 2), (10,), (1,) * 10])
@pytest.mark.parametrize(("dp", "pp", "tp"), [*itertools.product((1, 2, 3), (1, 2, 3), (1, 2))])
def test_every_slot_replica_and_stage_is_told_once(racks: tuple[int, ...], dp: int, pp: int, tp: int) -> None:
    layout = ParallelLayout(dp=dp, pp=pp, tp=tp)
    found = lines(layout, world.fleet(*racks))
    assert sum(line.slots for line in found) == layout.world
    nodes = [name for line in found for name in line.nodes]
    assert len(nodes) == len(set(nodes))
    held = {
        (replica, stage)
        for line in found
        for replicas, stages in line.holds
        for replica in replicas
        for stage in stages
    }
    assert held == set(itertools.product(range(dp), range(pp)))


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (["n0", "n1", "n2"], "n0-n2"),
        (["n0", "n2", "n3"], "n0, n2-n3"),
        (["n08", "n09", "n10"], "n08-n10"),
        (["a", "b1", "b2", "c3"], "a, b1-b2, c3"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.1-10.0.0.2"),
        (["spare"], "spare"),
        ([], ""),
        (["n3", "n1"], "n3, n1"),
        (["n" + "9" * 30], "n" + "9" * 30),
    ],
)
def test_names_that_follow_each_other(found: list[str], told: str) -> None:
    assert rankmap.names(found) == told


@pytest.mark.parametrize(
    ("found", "told"), [([0, 1, 2, 5], "0-2, 5"), ([4], "4"), ([], ""), (range(128), "0-127"), ([1, 3], "1, 3")]
)
def test_numbers_that_follow_each_other(found: list[int], told: str) -> None:
    assert rankmap.numbers(found) == told
