from __future__ import annotations

import itertools
import random
import time
from collections import Counter, defaultdict

import pytest

from service.contracts.cluster import Fleet, Node
from service.contracts.errors import PlacementRefused
from service.contracts.job import PlacementPolicy
from service.core import placement
from service.core.state import Placement, Slot
from tests.service.core import world
from workers.spec import ParallelLayout

ANY_TP = PlacementPolicy(tp="any")


def place(layout: ParallelLayout, fleet: Fleet, taken: str = "", **policy: str) -> Placement:
    """`taken` names slots as `n0:1`."""
    ids = {node.name: node.id for node in fleet.nodes}
    held = {(ids[name], int(index)) for name, index in (slot.split(":") for slot in taken.split())}
    return placement.place(layout, fleet, held, PlacementPolicy.model_validate(policy), "cpu")


def names(found: Placement) -> str:
    """Slots in rank order."""
    return " ".join(f"{slot.name}:{slot.index}" for slot in found.slots)


def replicas(found: Placement, layout: ParallelLayout) -> list[list[list[Slot]]]:
    """[dp][pp] -> the tp group."""
    groups: dict[tuple[int, int], list[Slot]] = defaultdict(list)
    for rank, slot in enumerate(found.slots):
        pp, dp, _ = layout.coordinates(rank)
        groups[dp, pp].append(slot)
    return [[groups[dp, pp] for pp in range(layout.pp)] for dp in range(layout.dp)]


def layout(dp: int = 1, pp: int = 1, tp: int = 1) -> ParallelLayout:
    return ParallelLayout(dp=dp, pp=pp, tp=tp)


@pytest.mark.parametrize(
    ("wanted", "fleet", "taken", "policy", "slots"),
    [
        # replica 0 in r0, replica 1 in r1; ranks in order pp, dp, tp from outside in
        (layout(2, 2, 2), world.fleet(2, 2), "", {}, "n0:0 n0:1 n2:0 n2:1 n1:0 n1:1 n3:0 n3:1"),
        # replicas spread, numbered rack by rack
        (layout(dp=2), world.fleet(2, 2), "", {}, "n0:0 n2:0"),
        (layout(dp=4), world.fleet(2, 2), "", {}, "n0:0 n0:1 n2:0 n2:1"),
        (layout(dp=4), world.fleet(1, 3), "n0:0", {}, "n0:1 n1:0 n1:1 n2:0"),
        # a pipeline stays in the rack that has room
        (layout(pp=2, tp=2), world.fleet(1, 2), "", {}, "n1:0 n1:1 n2:0 n2:1"),
        (layout(pp=2, tp=2), world.fleet(2, 2), "n0:0", {}, "n2:0 n2:1 n3:0 n3:1"),
        # or leaves it where none has: next stages on next nodes
        (layout(pp=3, tp=2), world.fleet(2, 2), "", {}, "n0:0 n0:1 n1:0 n1:1 n2:0 n2:1"),
        (layout(pp=2, tp=2), world.fleet(1, 1), "", {}, "n0:0 n0:1 n1:0 n1:1"),
        (layout(pp=2, tp=2), world.fleet(1, 2), "", {"pp": "any"}, "n0:0 n0:1 n1:0 n1:1"),
        # tp groups take whole pairs only; what is free elsewhere is passed over
        (layout(dp=2, tp=2), world.fleet(3), "n0:0", {}, "n1:0 n1:1 n2:0 n2:1"),
        # unless they may leave their node, and then the rack last
        (layout(tp=2), world.fleet(2), "n0:0 n1:1", {"tp": "any"}, "n0:1 n1:0"),
        (layout(tp=2), world.fleet(1, 2), "n0:0 n1:1 n2:0", {"tp": "any"}, "n1:0 n2:1"),
        (layout(tp=2), world.fleet(1, 1), "n0:0 n1:1", {"tp": "any"}, "n0:1 n1:0"),
        (layout(tp=4), world.fleet(2), "", {"tp": "any"}, "n0:0 n0:1 n1:0 n1:1"),
    ],
)
def test_places(wanted: ParallelLayout, fleet: Fleet, taken: str, policy: dict[str, str], slots: str) -> None:
    assert names(place(wanted, fleet, taken, **policy)) == slots


@pytest.mark.parametrize(
    ("wanted", "fleet", "taken", "policy", "message"),
    [
        (layout(dp=5), world.fleet(2), "", {}, "needs 5 cpu slots; 4 of 4 are free"),
        (layout(dp=3), world.fleet(2), "n0:0 n1:0", {}, "needs 3 cpu slots; 2 of 4 are free"),
        (layout(dp=2, tp=2), world.fleet(3), "n0:0 n1:0", {},
         "needs 2 nodes with 2 free slots for tp 2; there are 1 among 4 free slots"),
        (layout(tp=4), world.fleet(2), "", {},
         "needs 1 node with 4 free slots for tp 4; there are 0 among 4 free slots"),
        (layout(dp=5, tp=3), world.fleet(2, slots=8), "", {},
         "needs 5 groups of 3 free slots in one node for tp 3; there are 4 among 16 free slots"),
        (layout(pp=4, tp=2), world.fleet(3, 2), "", {"pp": "rack"},
         "needs 4 nodes with 2 free slots for tp 2 in one rack; the largest rack has 3"),
        (layout(dp=3, pp=2, tp=2), world.fleet(3, 3), "", {"pp": "rack"},
         "needs 2 nodes with 2 free slots for tp 2 in one rack for each of 3 replicas, 2 find them; "
         "the largest rack has 3"),
        (layout(tp=2), world.fleet(1, 1), "n0:0 n1:0", {"tp": "any", "pp": "rack"},
         "needs 1 node with 2 free slots for tp 2; there are 0 among 2 free slots"),
        (layout(dp=2), Fleet(), "", {}, "needs 2 cpu slots; 0 of 0 are free"),
        (layout(dp=2), world.fleet(2, device="gpu"), "", {}, "needs 2 cpu slots; 0 of 0 are free"),
    ],
)  # fmt: skip
def test_refuses_with_counts(
    wanted: ParallelLayout, fleet: Fleet, taken: str, policy: dict[str, str], message: str
) -> None:
    with pytest.raises(PlacementRefused) as refused:
        place(wanted, fleet, taken, **policy)
    assert refused.value.message == message


def test_without_labels_every_node_is_its_own_rack() -> None:
    fleet = Fleet(tuple(Node(f"id{i}", f"n{i}", 4) for i in range(3)))
    assert names(place(layout(dp=2, pp=2, tp=2), fleet)) == "n0:0 n0:1 n1:0 n1:1 n0:2 n0:3 n1:2 n1:3"


SHAPES = [layout(*sizes) for sizes in itertools.product((1, 2, 3), (1, 2), (1, 2, 3))]


@pytest.mark.parametrize("wanted", SHAPES, ids=str)
def test_small_fleets_against_brute_force(wanted: ParallelLayout) -> None:
    """Placed when it can be; no tp group crosses a node; pipelines cross racks only where they must."""
    choice = random.Random(str(wanted))
    for _ in range(60):
        fleet = Fleet(
            tuple(
                Node(f"id{i}", f"n{i}", choice.randint(1, 4), rack=f"r{choice.randint(0, 2)}")
                for i in range(choice.randint(1, 5))
            )
        )
        every = [(node.id, index) for node in fleet.nodes for index in range(node.slots)]
        taken = {slot for slot in every if choice.random() < 0.2}
        free = Counter(node for node, index in every if (node, index) not in taken)
        groups: Counter[str] = Counter()
        for node in fleet.nodes:
            groups[node.rack_key] += free[node.id] // wanted.tp
        whole = sum(count // wanted.pp for count in groups.values())
        try:
            found = placement.place(wanted, fleet, taken, PlacementPolicy(), "cpu")
        except PlacementRefused:
            assert groups.total() < wanted.dp * wanted.pp
            with pytest.raises(PlacementRefused):
                placement.place(wanted, fleet, taken, PlacementPolicy(pp="rack"), "cpu")
            continue
        assert groups.total() >= wanted.dp * wanted.pp
        used = [(slot.node, slot.index) for slot in found.slots]
        assert len(set(used)) == wanted.world
        assert not set(used) & taken
        assert set(used) <= set(every)
        racks = {node.id: node.rack_key for node in fleet.nodes}
        inside = 0
        for stages in replicas(found, wanted):
            assert all(len({slot.node for slot in group}) == 1 for group in stages)
            inside += len({racks[slot.node] for group in stages for slot in group}) == 1
        assert inside >= min(whole, wanted.dp)
        assert found == placement.place(wanted, fleet, taken, PlacementPolicy(), "cpu")


def test_sixteen_thousand_slots() -> None:
    fleet = Fleet(tuple(Node(f"id{i}", f"n{i}", 8, rack=f"r{i // 16}") for i in range(2048)))
    wanted = layout(dp=128, pp=16, tp=8)
    began = time.perf_counter()
    found = placement.place(wanted, fleet, frozenset(), PlacementPolicy(), "cpu")
    assert time.perf_counter() - began < 2
    assert len(set(found.slots)) == 16384
    racks = {node.id: node.rack for node in fleet.nodes}
    assert all(len({racks[s.node] for group in stages for s in group}) == 1 for stages in replicas(found, wanted))
