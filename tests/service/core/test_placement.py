from __future__ import annotations

import functools
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


def test_a_tp_group_stays_in_its_nvlink_domain_which_may_span_nodes() -> None:
    """Domains of 76 GPUs in nodes of 4: tp 8 takes two nodes, and never one of each of two domains."""
    domains = [("a", 19), ("b", 19)]
    nodes = [Node(f"{d}{n}", f"{d}{n}", 4, rack=f"r{d}", nvlink=f"nv{d}") for d, count in domains for n in range(count)]
    wanted = layout(dp=4, pp=4, tp=8)
    found = place(wanted, Fleet(tuple(nodes)))
    for stages in replicas(found, wanted):
        for group in stages:
            assert len({slot.name[0] for slot in group}) == 1
            assert len({slot.node for slot in group}) == 2
    with pytest.raises(
        PlacementRefused, match="needs 19 groups of 8 free slots in one NVLink domain for tp 8; there are 18"
    ):
        place(layout(dp=19, tp=8), Fleet(tuple(nodes)), tp="nvlink")
    with pytest.raises(PlacementRefused, match="there are 0 among 152 free slots"):
        place(wanted, Fleet(tuple(nodes)), tp="node")


def test_groups_inside_a_node_come_before_those_over_two() -> None:
    fleet = Fleet(tuple(Node(f"id{n}", f"n{n}", 4, rack="r", nvlink="nv") for n in range(3)))
    found = place(layout(dp=4, tp=2), fleet, taken="n0:0 n1:1")
    assert names(found) == "n0:1 n0:2 n1:0 n1:2 n2:0 n2:1 n2:2 n2:3"
    assert names(place(layout(dp=5, tp=2), fleet, taken="n0:0 n1:1")).endswith("n0:3 n1:3")


def mixed(**counts: int) -> Fleet:
    kinds = [(kind, number) for kind, count in counts.items() for number in range(count)]
    return Fleet(tuple(Node(f"{k}{n}", f"{k}{n}", 2, rack=f"r{n % 2}", device="cpu", accelerator=k) for k, n in kinds))


@pytest.mark.parametrize(
    ("dp", "kinds"),
    [
        (1, "BB"),  # the fastest that has room for all
        (2, "BB BB"),
        (3, "AA AA AA"),
        (4, "AA AA AA AA"),
        (5, "BB BB AA AA AA"),  # none has: the faster ones first, and no replica of two kinds
        (6, "BB BB AA AA AA AA"),
    ],
)
def test_a_replica_stands_on_one_kind_of_device(dp: int, kinds: str) -> None:
    wanted = layout(dp=dp, pp=2, tp=2)
    found = placement.place(wanted, mixed(A=8, B=4), frozenset(), PlacementPolicy(), "cpu", {"A": 1.0, "B": 3.0})
    replica_kinds = [{slot.name[0] for group in stages for slot in group} for stages in replicas(found, wanted)]
    assert all(len(one) == 1 for one in replica_kinds)
    assert " ".join(next(iter(one)) * 2 for one in replica_kinds) == kinds


def test_a_replica_of_two_kinds_is_refused_with_counts() -> None:
    with pytest.raises(PlacementRefused) as refused:
        place(layout(dp=3, pp=2, tp=2), mixed(A=3, B=3))
    assert refused.value.message == (
        "needs 3 replicas of 4 slots, each on devices of one kind; A has room for 1, B has room for 1"
    )


def crossings(found: Placement, wanted: ParallelLayout, fleet: Fleet) -> int:
    """Edges between next stages that leave a rack."""
    racks = {node.id: node.rack_key for node in fleet.nodes}
    return sum(
        racks[one[0].node] != racks[other[0].node]
        for stages in replicas(found, wanted)
        for one, other in itertools.pairwise(stages)
    )


def fewest(sizes: tuple[int, ...], dp: int, pp: int) -> int:
    """By trying everything: a pipeline takes some of each of some racks, and crosses once less than it has racks."""
    if dp == 0:
        return 0
    best = 1 << 30
    for takes in itertools.product(*(range(min(size, pp) + 1) for size in sizes)):
        if sum(takes) == pp:
            rest = tuple(sorted(size - take for size, take in zip(sizes, takes, strict=True)))
            best = min(best, sum(take > 0 for take in takes) - 1 + _fewest(rest, dp - 1, pp))
    return best


_fewest = functools.cache(fewest)


@pytest.mark.parametrize("seed", range(60))
def test_pipelines_cross_racks_as_rarely_as_can_be(seed: int) -> None:
    choice = random.Random(seed)
    sizes = [choice.randint(0, 7) for _ in range(choice.randint(2, 5))]
    fleet = Fleet(
        tuple(Node(f"id{r}-{n}", f"r{r}n{n}", 1, rack=f"r{r}") for r, size in enumerate(sizes) for n in range(size))
    )
    pp = choice.randint(2, 5)
    for dp in range(1, sum(sizes) // pp + 1):
        wanted = layout(dp=dp, pp=pp)
        assert crossings(place(wanted, fleet), wanted, fleet) == _fewest(tuple(sorted(sizes)), dp, pp), (sizes, dp, pp)


def test_sixteen_thousand_slots_in_racks_of_unequal_size_with_holes() -> None:
    choice = random.Random(1)
    racks = [choice.randint(5, 40) for _ in range(120)]
    fleet = Fleet(
        tuple(Node(f"id{r}-{n}", f"r{r}n{n}", 8, rack=f"r{r}") for r, size in enumerate(racks) for n in range(size))
    )
    taken = {(node.id, choice.randrange(8)) for node in fleet.nodes if choice.random() < 0.05}
    whole = sum(node.slots == 8 and not any((node.id, i) in taken for i in range(8)) for node in fleet.nodes)
    wanted = layout(dp=whole // 16, pp=16, tp=8)
    assert wanted.world >= 16384
    began = time.process_time()
    found = placement.place(wanted, fleet, taken, PlacementPolicy(), "cpu")
    assert time.process_time() - began < 0.5
    assert len(set(found.slots)) == wanted.world
    assert not {(slot.node, slot.index) for slot in found.slots} & taken
