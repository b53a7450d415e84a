import dataclasses

import pytest

from service.core.plan import network
from service.core.plan.cluster import Cluster
from service.core.plan.stack import PRIOR, STACKS

STACK = dataclasses.replace(STACKS["phalanx"], rates=dataclasses.replace(PRIOR, nvlink=0.5, nic=0.8))
H100 = Cluster.of("H100-80GB", 1024)  # NVLink 450 GB/s, network card 50 GB/s a GPU
LATE = network.START_S + 7 * network.NVLINK_HOP_S


@pytest.mark.parametrize(
    ("size", "stride", "bandwidth"),
    [
        (8, 1, 225e9),  # inside a node
        (2, 4, 225e9),
        (16, 8, 40e9),  # one rank a node: its own card
        (16, 4, 80e9),  # two ranks a node: two cards
        (64, 1, 225e9),  # eight cards are faster than NVLink
    ],
)
def test_bandwidth_is_that_of_the_links_crossed(size, stride, bandwidth):
    assert network.bus(H100, STACK, size, stride).bandwidth == pytest.approx(bandwidth)


def test_a_ring_moves_all_but_its_own_part():
    bus = network.bus(H100, STACK, 8, 1)
    assert bus.all_gather_s(225e9) == pytest.approx(7 / 8 + LATE)
    assert bus.all_reduce_s(225e9) == pytest.approx(14 / 8 + 2 * LATE)
    assert network.bus(H100, STACK, 1, 1).all_reduce_s(1e12) == 0


def test_an_oversubscribed_network_counts_between_racks_alone():
    racks = dataclasses.replace(H100, rack=64, cross_rack=0.25)
    assert network.bus(racks, STACK, 8, 8).bandwidth == pytest.approx(40e9)
    assert network.bus(racks, STACK, 16, 8).bandwidth == pytest.approx(10e9)
    assert network.send_s(racks, STACK, 1e9, 64) > network.send_s(racks, STACK, 1e9, 8)


def test_a_domain_may_span_nodes():
    gb200 = Cluster.of("GB200", 144)
    assert network.bus(gb200, STACK, 64, 1).bandwidth == pytest.approx(450e9)


def test_tokens_to_other_nodes_share_the_cards():
    inside = network.all_to_all_s(H100, STACK, 1e9, 8, 1)
    outside = network.all_to_all_s(H100, STACK, 1e9, 64, 1)
    assert inside == pytest.approx(7 / 8 / 225 + network.START_S)
    assert outside == pytest.approx(56 / 64 / 40 + network.NIC_HOP_S)
    assert network.all_to_all_s(H100, STACK, 1e9, 1, 1) == 0
