import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.plan import layout as layouts
from service.core.plan import shape
from service.core.plan.cluster import Cluster
from service.core.plan.cost import Estimator, estimate
from service.core.plan.layout import Layout
from service.core.plan.stack import OWN, OWN_COMPILED, STACKS, probed
from workers.models.spec import ModelSpec
from workers.spec import ParallelLayout, TrainSpec, layout_problem
from workers.spec import layouts as every

LLAMA_8B = ModelSpec.model_validate({"preset": "llama3-8b"})
MIXTRAL = ModelSpec.model_validate({"preset": "mixtral-8x7b", "seq_len": 4096})
TINY = ModelSpec.model_validate({"preset": "tiny-moe"})
MODELS = {"llama3-8b": LLAMA_8B, "mixtral-8x7b": MIXTRAL, "tiny-moe": TINY}

parallels = st.builds(
    dict,
    dp=st.sampled_from([1, 2, 3, 8]),
    pp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 4, 8]),
    ep=st.sampled_from([1, 2, 4]),
    vpp=st.sampled_from([1, 2]),
    micro_batch=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb", "zbv"]),
    zero=st.sampled_from([1, 2, 3]),
    recompute=st.sampled_from(["none", "selective", "inner", "full"]),
)


def legal(model: ModelSpec, fields: dict, batch: int = 48) -> Layout | None:
    try:
        parallel = ParallelLayout(**fields)
    except ValueError:
        return None
    train = TrainSpec(steps=1, global_batch=batch)
    return layouts.of(parallel, model, batch) if layout_problem(parallel, model, train) is None else None


def scaled(cluster: Cluster, part: str, factor: float) -> Cluster:
    if part == "nic":
        return dataclasses.replace(cluster, nic=cluster.nic * factor)
    gpu = dataclasses.replace(cluster.gpu, **{part: getattr(cluster.gpu, part) * factor})
    return dataclasses.replace(cluster, gpu=gpu)


@settings(max_examples=150, deadline=None)
@given(fields=parallels, name=st.sampled_from(list(MODELS)), gpu=st.sampled_from(["H100-80GB", "A100-40GB", "cpu"]))
def test_every_legal_layout_has_a_finite_estimate_that_adds_up(fields, name, gpu):
    model = MODELS[name]
    if (layout := legal(model, fields)) is None:
        return
    found = estimate(shape.of(model), layout, 48, Cluster.of(gpu, layout.world))
    assert math.isfinite(found.step_s)
    assert found.step_s > 0
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert 0 <= found.bubble < 1
    assert 0 < found.mfu < 1
    assert len(found.memory) == layout.pp
    assert all(math.isfinite(stage.total) and stage.total > 0 for stage in found.memory)


@settings(max_examples=150, deadline=None)
@given(
    fields=parallels,
    name=st.sampled_from(list(MODELS)),
    part=st.sampled_from(["bandwidth", "nvlink", "nic", "peak"]),
    factor=st.floats(1.01, 10),
    node=st.sampled_from([2, 8]),
)
def test_more_of_anything_is_never_slower(fields, name, part, factor, node):
    model = MODELS[name]
    if (layout := legal(model, fields)) is None:
        return
    cluster = Cluster.of("H100-80GB", layout.world, gpus_per_node=node, domain=node)
    before, after = (
        estimate(shape.of(model), layout, 48, each).step_s for each in (cluster, scaled(cluster, part, factor))
    )
    assert after <= before * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(fields=parallels, name=st.sampled_from(list(MODELS)), factor=st.floats(1, 10))
def test_more_memory_never_makes_a_layout_illegal(fields, name, factor):
    model = MODELS[name]
    if (layout := legal(model, fields)) is None:
        return
    cluster = Cluster.of("A100-40GB", layout.world)
    before, after = (
        estimate(shape.of(model), layout, 48, each).fits for each in (cluster, scaled(cluster, "memory", factor))
    )
    assert after >= before


def test_memory_alone_is_that_of_the_estimate():
    for parallel in itertools.islice(every(16, LLAMA_8B, TrainSpec(steps=1, global_batch=32)), 20):
        layout = layouts.of(parallel, LLAMA_8B, 32)
        estimator = Estimator(shape.of(LLAMA_8B), 32, Cluster.of("H100-80GB", layout.world))
        assert estimator.memory(layout) == estimator.estimate(layout).memory


def test_layouts_that_share_layers_do_not_share_more():
    estimator = Estimator(shape.of(LLAMA_8B), 64, Cluster.of("H100-80GB", 64))
    same = [Layout(dp=8, pp=pp, tp=8 // pp, zero=zero) for pp in (1, 2, 4) for zero in (1, 3)]
    together = [estimator.estimate(layout) for layout in same]
    apart = [estimate(shape.of(LLAMA_8B), layout, 64, Cluster.of("H100-80GB", 64)) for layout in same]
    assert together == apart


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        (Layout(dp=8, recompute="full"), Layout(dp=8)),
        (Layout(dp=2, pp=4, accumulation=4), Layout(dp=2, pp=4, vpp=2, schedule="interleaved_1f1b", accumulation=4)),
        (Layout(dp=8, zero=2), Layout(dp=8, zero=1)),
        (Layout(dp=1, tp=8, sequence_parallel=False), Layout(dp=1, tp=8)),
    ],
    ids=["recompute", "interleaving", "gradients reduced every micro-batch", "sequence parallel"],
)
def test_what_is_known_to_be_faster_is(slower, faster):
    cluster = Cluster.of("H100-80GB", 8, domain=1)
    found = [estimate(shape.of(LLAMA_8B), layout, 64, cluster).step_s for layout in (slower, faster)]
    assert found[1] < found[0]


def test_step_of_one_rank_by_hand():
    """All of peak, memory and links free: products and nothing else."""
    gpu = dataclasses.replace(Cluster.of("H100-80GB", 1).gpu, bandwidth=1e30, multiprocessors=1)
    free = dataclasses.replace(OWN.rates, gemm_hopper=1.0, flash_hopper=1.0, memory=1.0, ramp=0.0, launch_s=0.0)
    stack = dataclasses.replace(OWN, rates=free, step_s=0.0)
    found = estimate(shape.of(LLAMA_8B), Layout(), 2, Cluster(gpu, 1), stack)
    seconds = found.step_s - found.parts["launch"] - found.parts["attention"]
    matrices = shape.of(LLAMA_8B).flops() - 6 * 32 * 32 * 256 * 8192
    assert seconds == pytest.approx(matrices * 2 * 8192 / 989e12, rel=0.01)


def test_a_late_stage_reduces_while_the_first_one_works():
    cluster = Cluster.of("H100-80GB", 16, gpus_per_node=1, nic=20e9)
    first, last = (
        estimate(shape.of(LLAMA_8B), Layout(dp=8, pp=2, stage_layers=layers), 64, cluster).parts["dp"]
        for layers in ((24, 8), (8, 24))
    )
    assert last < 0.9 * first


def test_a_probe_scales_everything():
    cluster, layout = Cluster.of("H100-80GB", 8), Layout(dp=8)
    guess = estimate(shape.of(LLAMA_8B), layout, 64, cluster)
    known = probed(OWN, guess.step_s, 1.25 * guess.step_s)
    assert estimate(shape.of(LLAMA_8B), layout, 64, cluster, known).step_s == pytest.approx(1.25 * guess.step_s)


def test_compiled_blocks_are_faster():
    found = [
        estimate(shape.of(LLAMA_8B), Layout(dp=8), 64, Cluster.of("H100-80GB", 8), stack)
        for stack in (OWN_COMPILED, OWN)
    ]
    assert found[0].step_s < found[1].step_s


def test_tokens_and_hours():
    found = estimate(shape.of(LLAMA_8B), Layout(dp=8), 64, Cluster.of("H100-80GB", 8), STACKS["nemo-2025"])
    assert found.tokens == 64 * 8192
    assert found.days(found.tokens_per_s * 86400) == pytest.approx(1)
    assert found.gpu_hours(found.tokens_per_s * 3600) == pytest.approx(8)
    assert found.mfu == pytest.approx(found.flops / found.step_s / 8 / 989e12)
