"""Anchor: table 4 of "Reducing Activation Recomputation" (arXiv 2205.05198), one layer of GPT 22B on eight A100."""

import dataclasses

import pytest

from service.core.plan import kernels, layer, network
from service.core.plan.cluster import Cluster
from service.core.plan.layer import Passes, Rank
from service.core.plan.layout import Layout
from service.core.plan.shape import Experts, Shape
from service.core.plan.stack import STACKS, Stack, fit

GPT_22B = Shape(48, 6144, 64, 64, 96, 24576, 51200, 2048, gated=False, dropout=True, tied=True)
MIXTURE = Shape(32, 4096, 32, 8, 128, 14336, 32000, 4096, experts=Experts(8, 2, 14336, 0, 0))
A100 = Cluster.of("A100-80GB", 8)


def rank(layout: Layout, stack: Stack, shape: Shape = GPT_22B, cluster: Cluster = A100) -> Rank:
    bus = network.bus(cluster, stack, layout.tp, 1)
    tokens = layout.micro_batch * shape.seq_len / layout.cp
    return Rank(shape, layout, kernels.device(cluster.gpu, stack), cluster, bus, tokens)


def total(passes: Passes) -> float:
    return sum(each.seconds for each in (passes.forward, passes.inputs, passes.weights, passes.again))


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "forward_ms", "combined_ms"),
    [
        (False, "none", 7.7, 19.6),
        (True, "none", 7.2, 19.0),
        (False, "full", 7.7, 27.2),
        (False, "attention", 7.7, 20.9),
        (True, "attention", 7.2, 20.3),
    ],
)
def test_a_layer_takes_what_was_measured(sequence_parallel, recompute, forward_ms, combined_ms):
    """With rates that these times had no part in."""
    stack = fit(STACKS["megatron-2022"], "arXiv 2205.05198")
    layout = Layout(tp=8, micro_batch=4, sequence_parallel=sequence_parallel, recompute=recompute)
    found = layer.layer(rank(layout, stack), False)
    assert found.forward.seconds * 1000 == pytest.approx(forward_ms, rel=0.10)
    assert total(found) * 1000 == pytest.approx(combined_ms, rel=0.10)


@pytest.mark.parametrize(
    ("recompute", "parts"),
    [
        ("none", ()),
        ("attention", ("attention", "launch")),
        ("cheap", ("memory", "launch")),
        ("half", ("products", "memory", "launch")),
        ("inner", ("products", "attention", "memory", "launch")),
        ("full", ("products", "attention", "memory", "launch", "tp")),
    ],
)
def test_what_is_computed_again(recompute, parts):
    again = layer.layer(rank(Layout(tp=8, recompute=recompute), STACKS["megatron-2021"]), False).again
    assert tuple(kind for kind, seconds in zip(layer.KINDS, again.by_kind, strict=True) if seconds) == parts


def test_a_share_of_layers_may_be_computed_again():
    whole, half = (
        layer.layer(rank(Layout(tp=8, recompute="full", recompute_share=share), STACKS["phalanx"]), False).again
        for share in (1.0, 0.5)
    )
    assert half.seconds == pytest.approx(whole.seconds / 2)


def test_a_host_that_is_slow_shows_where_kernels_are_short():
    slow = dataclasses.replace(STACKS["phalanx"], rates=dataclasses.replace(STACKS["phalanx"].rates, launch_s=1e-3))
    fast = layer.layer(rank(Layout(), STACKS["phalanx"]), False).forward
    bound = layer.layer(rank(Layout(), slow), False).forward
    assert bound.seconds > 16 * 1e-3
    assert fast.launch < 0.1 * fast.seconds


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_experts_exchange_tokens_over_ep_alone(ep):
    layout = Layout(dp=8, ep=ep)
    found = layer.layer(rank(layout, STACKS["phalanx"], MIXTURE), True)
    assert (found.forward.ep > 0) is (ep > 1)
    assert found.forward.products == pytest.approx(
        layer.layer(rank(Layout(), STACKS["phalanx"], MIXTURE), True).forward.products, rel=0.15
    )


def test_tensor_parallel_traffic_outside_of_a_domain_hides_nothing_forward():
    stack = STACKS["megatron-core-2024"]
    inside, outside = (
        layer.layer(rank(Layout(tp=8), stack, cluster=Cluster.of("A100-80GB", 8, domain=domain)), False)
        for domain in (8, 4)
    )
    assert outside.forward.tp > 2.5 * inside.forward.tp


def test_context_parallel_sends_keys_and_values():
    found = layer.layer(rank(Layout(cp=2), STACKS["nemo-2025"]), False)
    assert found.forward.cp > 0
    assert found.inputs.cp == pytest.approx(2 * found.forward.cp)
