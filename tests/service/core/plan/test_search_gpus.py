"""`parallel: auto` on GPUs that figures are known of."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from service.contracts.cluster import Fleet, Node
from service.contracts.errors import PlacementRefused, UserError
from service.contracts.job import JobSpec
from service.core import placement
from service.core.plan import kinds, ranking, search
from service.core.plan import layout as layouts
from tests.service.core import world


def fleet(*groups: tuple[str, int], slots: int = 8, rack: int = 4) -> Fleet:
    """Nodes of each kind of accelerator, in racks of so many."""
    return Fleet(
        tuple(
            Node(f"{kind}-{i}", f"{kind}-{i}", slots, rack=f"{kind}-r{i // rack}", device="gpu", accelerator=kind)
            for kind, count in groups
            for i in range(count)
        )
    )


def job(preset: str, slots: int, batch: int, **fields: Any) -> JobSpec:
    given = {"model": {"preset": preset}, "train": {"steps": 10, "global_batch": batch}, **fields}
    return world.job_spec(slots, device="gpu", **given)


def test_the_best_by_the_cost_model_is_taken_and_says_so() -> None:
    nodes, spec = fleet(("H100", 4)), job("llama3-8b", 16, 64)
    layout, reason = search.choose(spec, nodes)
    (kind,) = kinds.of(nodes, "gpu")
    plans = ranking.ranked(spec.model, spec.train, kind.cluster(16, spec.placement))
    assert layout == plans[0].layout
    first = plans[0].estimate
    for figure in (
        str(layout),
        f"{first.step_s:.3g} s a step, MFU {first.mfu:.1%}",
        f"{first.memory_bytes / 1e9:.3g} of 80 GB on the fullest H100-80GB",
        f"the next best is {plans[1].layout}",
        f"with {plans[1].estimate.step_s:.3g} s",
    ):
        assert figure in reason
    search.check_fits(spec, nodes)


@pytest.mark.parametrize("named", ["H100", "NVIDIA H100 80GB HBM3", "A100-80G", "B200"])
def test_names_as_ray_and_cuda_give_them(named: str) -> None:
    assert "s a step" in search.choose(job("llama3-8b", 16, 64), fleet((named, 2)))[1]


@pytest.mark.parametrize(
    ("nodes", "device"),
    [
        (fleet(("TPU-V4", 2)), "gpu"),
        (fleet(("", 2)), "gpu"),
        (fleet(("H100", 1), ("", 1)), "gpu"),  # figures are known of half of them
        (world.fleet(2, slots=8), "cpu"),
    ],
)
def test_without_figures_the_fewest_model_parallel_ranks_count(nodes: Fleet, device: str) -> None:
    spec = world.job_spec(16, device=device)
    layout, reason = search.choose(spec, nodes)
    assert str(layout) == "dp 16 x pp 1 x tp 1"
    assert "the fewest model-parallel ranks" in reason


def test_the_first_that_can_be_placed_is_taken() -> None:
    """Sixteen stages of a pipeline that may not leave racks of two nodes."""
    spec = job("gpt3-175b", 1024, 1536)
    free, _ = search.choose(spec, fleet(("H100", 128), rack=128))
    bound = job("gpt3-175b", 1024, 1536, placement={"pp": "rack"})
    inside, _ = search.choose(bound, fleet(("H100", 128), rack=2))
    assert free.pp * free.tp > 16
    assert inside.pp * inside.tp <= 16


def test_tp_stays_in_the_node_or_domain_that_placement_asks_for() -> None:
    nodes = Fleet(
        tuple(
            Node(f"n{i}", f"n{i}", 4, rack=f"r{i // 18}", device="gpu", accelerator="GB200", nvlink=f"d{i // 18}")
            for i in range(36)
        )
    )
    wide, _ = search.choose(job("llama3-405b", 128, 16), nodes)  # too few samples for what nodes of 4 would need
    narrow, _ = search.choose(job("llama3-405b", 128, 32, placement={"tp": "node"}), nodes)
    assert wide.tp > 4
    assert narrow.tp <= 4


def test_what_fits_no_memory_is_refused_with_sizes_and_what_would_do() -> None:
    spec, nodes = job("llama3-70b", 8, 64), fleet(("H100", 2))
    with pytest.raises(PlacementRefused) as refused:
        search.choose(spec, nodes)
    assert refused.value.message.startswith("no layout fits the memory of 8 H100-80GB: the leanest, dp 1 x pp 1 x tp 8")
    assert "GB on one, and 76.8 of 80 can be used" in refused.value.message
    assert refused.value.hint == "resources.slots 24 would do, and the fleet has 16 of these"
    with pytest.raises(UserError) as told:
        search.check_fits(spec, nodes)
    assert (told.value.message, told.value.hint) == (refused.value.message, refused.value.hint)
    assert told.value.field == "resources.slots"
    search.check_fits(job("llama3-70b", 24, 72), fleet(("H100", 3)))


def test_of_kinds_with_room_the_fastest_is_taken_unless_it_is_busy() -> None:
    nodes, spec = fleet(("A100-80G", 2), ("H100", 2)), job("llama3-8b", 16, 64)
    assert {node.accelerator for node in search.chosen(spec, nodes).fleet.nodes} == {"H100"}
    busy = {("H100-0", index) for index in range(8)}
    assert {node.accelerator for node in search.chosen(spec, nodes, busy).fleet.nodes} == {"A100-80G"}
    all_busy = busy | {("A100-80G-1", 3)}
    assert {node.accelerator for node in search.chosen(spec, nodes, all_busy).fleet.nodes} == {"H100"}  # it waits


def test_a_kind_whose_memory_lacks_is_passed_over() -> None:
    nodes = fleet(("A100-40GB", 4), ("H200", 4))
    choice = search.chosen(job("llama3-70b", 16, 64), nodes)
    assert {node.accelerator for node in choice.fleet.nodes} == {"H200"}


def test_replicas_on_two_kinds_get_work_by_their_speed() -> None:
    nodes, spec = fleet(("H100", 2), ("A100-80G", 2)), job("llama3-8b", 32, 512)
    choice = search.chosen(spec, nodes)
    layout = choice.layout
    assert layout.replica_weights is not None
    assert choice.speeds is not None
    assert choice.speeds["H100"] > 1.5 * choice.speeds["A100-80G"]
    slots = placement.place(layout, choice.fleet, frozenset(), spec.placement, "gpu", choice.speeds).slots
    on = [slots[dp * layout.tp].name.rpartition("-")[0] for dp in range(layout.dp)]
    by_kind = {
        kind: {weight for weight, own in zip(layout.replica_weights, on, strict=True) if own == kind} for kind in on
    }
    assert by_kind["H100"] == {1.0}
    (slow,) = by_kind["A100-80G"]
    assert slow == pytest.approx(choice.speeds["A100-80G"] / choice.speeds["H100"], abs=0.001)
    assert "replicas on H100 run" in choice.reason
    runs = layout.runs(512)
    most = {kind: max(count for count, own in zip(runs, on, strict=True) if own == kind) for kind in by_kind}
    last = 0.0
    for kind in kinds.of(nodes, "gpu"):
        estimator = ranking.estimating(spec.model, spec.train, kind.cluster(32, spec.placement))
        seen = dataclasses.replace(layouts.of(layout, spec.model, 512), accumulation=most[kind.name])
        last = max(last, estimator.estimate(seen).step_s)
    assert choice.plans[0].estimate.step_s == last
    even = layout.model_copy(update={"replica_weights": None})
    (_, old) = kinds.of(nodes, "gpu")
    unweighted = ranking.estimate(even, spec.model, spec.train, old.cluster(32, spec.placement)).estimate.step_s
    assert choice.plans[0].estimate.step_s < 0.8 * unweighted
    search.check_fits(spec, nodes)
    assert search.choose(spec, nodes) == (even, choice.reason)  # who knows no speeds gets no weights


def test_two_kinds_that_lack_memory_are_refused_by_the_smaller() -> None:
    with pytest.raises(search.MemoryLacking, match="of 16 A100-40GB"):
        search.choose(job("llama3-405b", 16, 64), fleet(("H100", 1), ("A100-40GB", 1)))


def test_an_explicit_layout_is_taken_as_it_is_even_where_memory_lacks() -> None:
    spec = job("llama3-70b", 8, 64, parallel={"tp": 8})
    assert search.choose(spec, fleet(("H100", 1)))[1] == "dp 1 x pp 1 x tp 8 as the job asks"
    search.check_fits(spec, fleet(("H100", 1)))


def test_asked_again_it_costs_next_to_nothing() -> None:
    """A queue asks at each of its passes."""
    spec, nodes = job("llama3-405b", 16_384, 2048), fleet(("H100", 2048))
    first = search.choose(spec, nodes)
    start = time.process_time()
    for _ in range(10):
        again = job("llama3-405b", 16_384, 2048)
        assert search.choose(again, Fleet(tuple(nodes.nodes))) == first
    assert time.process_time() - start < 0.5
