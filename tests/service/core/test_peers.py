"""Who keeps whose snapshots: never the own node, another rack before all, other groups next, and nobody too many."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from service.contracts.cluster import Fleet, Node
from service.contracts.job import PlacementPolicy
from service.core import peers, placement
from workers.spec import ParallelLayout


def fleet(racks: list[int], slots: int = 2) -> Fleet:
    """Racks of so many nodes."""
    names = [(rack, node) for rack, nodes in enumerate(racks) for node in range(nodes)]
    return Fleet(tuple(Node(f"id{r}-{n}", f"r{r}n{n}", slots, rack=f"r{r}") for r, n in names))


def placed(layout: ParallelLayout, fleet: Fleet) -> dict[str, str]:
    chosen = placement.place(layout, fleet, frozenset(), PlacementPolicy(), "cpu")
    found = peers.choose(layout, chosen, fleet)
    assert set(found) <= set(chosen.nodes)
    assert all(own != peer for own, peer in found.items())
    return found


def rack(node: str) -> str:
    return node.partition("-")[0]


@pytest.mark.parametrize(
    ("racks", "layout"),
    [
        ([2, 2], {"dp": 2, "pp": 2, "tp": 2}),
        ([2, 2], {"dp": 4, "tp": 2}),
        ([4, 4], {"dp": 2, "pp": 4, "tp": 2}),
        ([3, 3, 3], {"dp": 3, "pp": 3, "tp": 2}),
        ([4, 2], {"dp": 4, "tp": 2}),
    ],
)
def test_every_node_has_a_peer_in_another_rack(racks: list[int], layout: dict[str, int]) -> None:
    here = fleet(racks)
    found = placed(ParallelLayout(**layout), here)
    assert len(found) * 2 == ParallelLayout(**layout).world
    assert all(rack(own) != rack(peer) for own, peer in found.items())
    assert max(Counter(found.values()).values()) <= 2


def test_a_peer_is_outside_the_groups_of_its_owner() -> None:
    """Stages of a pipeline are in one rack, its replica in the other: the peer is at another stage."""
    found = placed(ParallelLayout(dp=2, pp=2, tp=2), fleet([2, 2]))
    assert found == {"id0-0": "id1-1", "id0-1": "id1-0", "id1-0": "id0-1", "id1-1": "id0-0"}


def test_a_node_that_does_not_train_is_a_peer_where_only_it_is_in_another_rack() -> None:
    assert placed(ParallelLayout(dp=2, tp=2), fleet([2, 1]))["id0-0"] == "id1-0"
    one_rack = Fleet(fleet([2]).nodes + fleet([0, 1]).nodes)
    layout = ParallelLayout(tp=2)
    at = placement.place(layout, Fleet(one_rack.nodes[:1]), frozenset(), PlacementPolicy(), "cpu")
    assert peers.choose(layout, at, one_rack) == {"id0-0": "id1-0"}


def test_one_rack_will_do_and_one_node_has_no_peer() -> None:
    assert placed(ParallelLayout(dp=2, tp=2), fleet([2])) == {"id0-0": "id0-1", "id0-1": "id0-0"}
    assert placed(ParallelLayout(tp=2), fleet([1])) == {}


def test_thousands_of_nodes_take_no_time() -> None:
    layout, here = ParallelLayout(dp=128, pp=16, tp=8), fleet([32] * 64, slots=8)
    chosen = placement.place(layout, here, frozenset(), PlacementPolicy(), "cpu")
    began = time.process_time()
    found = peers.choose(layout, chosen, here)
    assert time.process_time() - began < 5.0
    assert len(found) == 2048
    assert all(rack(own) != rack(peer) for own, peer in found.items())
    assert max(Counter(found.values()).values()) <= 2
