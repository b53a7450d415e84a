"""Anchors: figures 1 and 7 and section 4 of "Reducing Activation Recomputation" (arXiv 2205.05198), which its formulas
give; calculon's validation of them has the digits."""

import dataclasses

import pytest

from service.core.plan import memory, schedule, shape, stages
from service.core.plan.layout import Layout
from service.core.plan.shape import Shape
from service.core.plan.stack import STACKS
from workers import flops
from workers.models.spec import ModelSpec

GIB = 1024**3
STACK = STACKS["megatron-2022"]


def gpt(layers: int, hidden: int, heads: int) -> Shape:
    return Shape(
        layers, hidden, heads, heads, hidden // heads, 4 * hidden, 51200, 2048, gated=False, dropout=True, tied=True
    )


RUNS = {
    "22B": (gpt(48, 6144, 64), Layout(tp=8, micro_batch=4)),
    "175B": (gpt(96, 12288, 96), Layout(tp=8, pp=8, vpp=3, schedule="interleaved_1f1b")),
    "530B": (gpt(105, 20480, 128), Layout(tp=8, pp=35, vpp=3, schedule="interleaved_1f1b")),
    "1T": (gpt(128, 25600, 160), Layout(tp=8, pp=64)),
}


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "recompute", "gib"),
    [
        ("22B", False, "none", 59.25),
        ("22B", True, "attention", 9.5625),
        ("175B", False, "none", 66.84375),
        ("175B", True, "attention", 12.3515625),
        ("530B", False, "none", 114.0234375),
        ("530B", True, "attention", 23.076171875),
        ("1T", False, "none", 131.25),
        ("1T", True, "attention", 26.5625),
    ],
)
def test_activations_of_the_first_stage(name, sequence_parallel, recompute, gib):
    model, layout = RUNS[name]
    layout = dataclasses.replace(layout, sequence_parallel=sequence_parallel, recompute=recompute)
    held = stages.held(layout, model.layers, model.layers, 0.0)[0]
    per = memory.kept(model, layout, STACK)
    flight = schedule.in_flight(layout, 0, 512)
    assert flight * held.dense * per.dense / GIB == pytest.approx(gib, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "percent"),
    [  # of what tensor parallelism alone keeps: sequence parallel, selective, both, full
        ("22B", (66.84, 49.42, 16.18, 7.64)),
        ("175B", (62.04, 56.53, 18.49, 8.71)),
        ("530B", (58.31, 62.04, 20.27, 9.42)),
        ("1T", (58.31, 62.04, 20.27, 9.42)),
    ],
)
def test_what_each_technique_leaves(name, percent):
    model, layout = RUNS[name]
    base = memory.kept(model, layout_with(layout, False, "none"), STACK).dense
    ways = [(True, "none"), (False, "attention"), (True, "attention"), (False, "full")]
    found = [100 * memory.kept(model, layout_with(layout, *way), STACK).dense / base for way in ways]
    assert found == pytest.approx(percent, rel=0.07)


def layout_with(layout: Layout, sequence_parallel: bool, recompute: str) -> Layout:
    return dataclasses.replace(layout, sequence_parallel=sequence_parallel, recompute=recompute)


@pytest.mark.parametrize(("name", "gib"), [("22B", 45.5625), ("175B", 45.5625), ("530B", 31.640625)])
def test_parameters_and_optimizer_of_the_first_stage(name, gib):
    model, layout = RUNS[name]
    layout = dataclasses.replace(layout, zero=0)
    held = dataclasses.replace(stages.held(layout, model.layers, model.layers, 0.0)[0], first=False, last=False)
    elements = memory.parameters(model, layout, held)
    assert sum(memory.states(STACK, layout, *elements)) / GIB == pytest.approx(gib, rel=0.002)


@pytest.mark.parametrize(
    ("zero", "expected"),
    [  # bytes of 100 elements on 4 ranks: weights 2, gradients 4, optimizer 12 an element
        (0, (200, 400, 1200)),
        (1, (200, 400, 300)),
        (2, (200, 100, 300)),
        (3, (50, 100, 300)),
    ],
)
def test_states_by_zero_stage(zero, expected):
    stack = dataclasses.replace(STACK, sharded_weights=False)
    assert memory.states(stack, Layout(dp=4, zero=zero), 100.0, 0.0) == expected


def test_experts_are_in_shards_over_what_holds_copies_of_them():
    layout = Layout(dp=8, tp=1, ep=4, zero=1)
    weights, _, optimizer = memory.states(STACK, layout, 0.0, 100.0)
    assert (weights, optimizer) == (200, 600)  # two ranks have the same experts


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3"])
def test_ranks_hold_the_model_between_them(name):
    model = ModelSpec.model_validate({"preset": name})
    form = shape.of(model)
    layout = Layout(pp=4)
    held = stages.held(layout, form.layers, form.dense_layers, 0.0)
    total = sum(sum(memory.parameters(form, layout, rank)) for rank in held)
    tied = form.head if form.tied else 0  # stored on both ends
    assert total == pytest.approx(flops.parameters(model, form.vocab) + tied, rel=0.005)


@pytest.mark.parametrize("recompute", ["none", "cheap", "inner", "full"])
def test_more_recomputation_keeps_less(recompute):
    order = ["none", "cheap", "inner", "full"]
    model = shape.of(ModelSpec.model_validate({"preset": "llama3-8b"}))
    kept = {kind: memory.kept(model, Layout(recompute=kind), STACKS["phalanx"]).dense for kind in order}
    for less in order[order.index(recompute) + 1 :]:
        assert kept[less] < kept[recompute]
