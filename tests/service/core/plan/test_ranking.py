from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from typing import Any

import pytest
from pydantic import ValidationError

from service.core.plan import layout as layouts
from service.core.plan import ranking
from service.core.plan.cluster import Cluster
from workers.models.spec import ModelSpec
from workers.spec import ParallelLayout, TrainSpec, layout_problem

SMALL = {"layers": 6, "hidden": 1024, "heads": 8, "kv_heads": 4, "seq_len": 1024, "vocab_size": 32_000}
SPARSE = {**SMALL, "experts": {"count": 8, "top_k": 2, "hidden": 512, "shared": 512}}


def model(what: str | dict[str, Any]) -> ModelSpec:
    return ModelSpec.model_validate({"preset": what} if isinstance(what, str) else what)


def train(batch: int, **fields: Any) -> TrainSpec:
    return TrainSpec(steps=10, global_batch=batch, **fields)


def with_gpu(cluster: Cluster, **changes: float) -> Cluster:
    """Another GPU of other figures; the network card's share is the cluster's own."""
    nic = changes.pop("nic", cluster.nic)
    return dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, **changes), nic=nic)


CASES = [
    # model, GPU, how many, batch
    ("llama3-8b", "H100", 16, 64),
    ("llama3-8b", "A100-40GB", 64, 256),
    ("llama3-70b", "H100", 64, 256),
    ("gpt3-175b", "A100", 512, 768),
    ("mixtral-8x7b", "H100", 32, 64),
    (SPARSE, "H800", 16, 48),
    (SMALL, "V100", 12, 24),
]


@pytest.mark.parametrize(("what", "gpu", "gpus", "batch"), CASES)
def test_every_plan_is_legal_and_fits(what: str | dict[str, Any], gpu: str, gpus: int, batch: int) -> None:
    cluster, spec = Cluster.of(gpu, gpus), train(batch)
    found = ranking.every(model(what), spec, cluster)
    assert found
    for plan in found:
        ParallelLayout.model_validate(plan.layout.model_dump())
        assert layout_problem(plan.layout, model(what), spec) is None
        assert plan.layout.world == gpus
        assert plan.layout.tp <= cluster.domain
        assert plan.estimate.fits
        assert plan.estimate.memory_bytes <= 0.96 * cluster.gpu.memory
        assert plan.estimate.step_s == pytest.approx(sum(plan.estimate.parts.values()))
    assert [plan.estimate.step_s for plan in found] == sorted(plan.estimate.step_s for plan in found)
    assert len({plan.layout for plan in found}) == len(found)
    assert ranking.ranked(model(what), spec, cluster) == tuple(found[:4])


@pytest.mark.parametrize("domain", [1, 2, 4, 8])
def test_tp_stays_in_its_domain(domain: int) -> None:
    cluster = Cluster.of("H100", 32, gpus_per_node=domain, domain=domain)
    sizes = {plan.layout.tp for plan in ranking.every(model("llama3-8b"), train(64), cluster)}
    assert max(sizes) == domain


def test_a_domain_over_nodes_is_used() -> None:
    wide = Cluster.of("GB200", 64)
    assert max(plan.layout.tp for plan in ranking.every(model("llama3-70b"), train(64), wide)) > 4


@pytest.mark.parametrize(("what", "gpu", "gpus", "batch"), CASES)
@pytest.mark.parametrize("figure", ["nic", "nvlink", "bandwidth", "peak"])
def test_more_bandwidth_never_makes_the_best_plan_slower(
    what: str | dict[str, Any], gpu: str, gpus: int, batch: int, figure: str
) -> None:
    base = Cluster.of(gpu, gpus)
    now = base.nic if figure == "nic" else getattr(base.gpu, figure)
    best = [
        ranking.ranked(model(what), train(batch), with_gpu(base, **{figure: now * factor}))[0].estimate.step_s
        for factor in (0.5, 1, 2)
    ]
    assert best == sorted(best, reverse=True)


@pytest.mark.parametrize(("what", "gpu", "gpus", "batch"), CASES)
def test_more_memory_never_makes_the_best_plan_slower_or_one_illegal(
    what: str | dict[str, Any], gpu: str, gpus: int, batch: int
) -> None:
    base, best, known = Cluster.of(gpu, gpus), float("inf"), set()
    for factor in (0.3, 0.5, 0.9, 1, 2):
        found = ranking.every(model(what), train(batch), with_gpu(base, memory=base.gpu.memory * factor))
        sizes = {(one.layout.dp, one.layout.pp, one.layout.tp, one.layout.ep) for one in found}
        assert known <= sizes
        known = sizes
        if found:
            assert found[0].estimate.step_s <= best
            best = found[0].estimate.step_s


@functools.cache
def brute(what: str, gpus: int, batch: int) -> list[tuple[float, float]]:
    """(seconds of a step, bytes of the fullest GPU) of all that may be chosen from, without any shortcut."""
    spec, job, cluster = model(BRUTE[what]), train(batch), small(gpus)
    estimator, found = ranking.estimating(spec, job, cluster), []
    world = range(1, gpus + 1)
    for dp, pp, tp in itertools.product(world, world, world):
        if dp * pp * tp != gpus or tp > cluster.domain or batch // dp < pp:
            continue
        kinds = [("1f1b", 1), ("zbv", 2), *(("interleaved_1f1b", vpp) for vpp in range(2, 17))]
        others = itertools.product(
            world, (1, 2, 4, 8), kinds, (1, 3), ("none", "selective", "inner", "full"), (None, "weighed")
        )
        for ep, micro_batch, (schedule, vpp), zero, recompute, cut in others:
            if (zero == 3 and dp == 1) or (cut and (pp == 1 or schedule == "zbv")) or (ep > 1 and not spec.experts):
                continue
            if batch // micro_batch // dp < pp or short(spec.layers, pp, vpp, schedule):
                continue
            try:
                layout = ParallelLayout(
                    dp=dp, pp=pp, tp=tp, ep=ep, micro_batch=micro_batch, schedule=schedule, vpp=vpp, zero=zero,
                    recompute=recompute, stage_layers=cut,
                )  # fmt: skip
            except ValidationError:
                continue
            if layout_problem(layout, spec, job) is None:
                estimate = estimator.estimate(layouts.of(layout, spec, batch))
                found.append((estimate.step_s, estimate.memory_bytes))
    return found


def small(gpus: int, gigabytes: float = 80) -> Cluster:
    return with_gpu(Cluster.of("H100", gpus, gpus_per_node=4, domain=4), memory=gigabytes * 1e9)


def short(layers: int, pp: int, vpp: int, schedule: str) -> bool:
    """More than one stage of a rank lacks a layer that the others have."""
    return schedule == "interleaved_1f1b" and -layers % (pp * vpp) >= pp


BRUTE = {
    "small": SMALL,
    "long": {**SMALL, "layers": 8, "seq_len": 4096},
    "sparse": SPARSE,
    "narrow": {**SMALL, "layers": 8, "heads": 1, "kv_heads": 1},
}


@pytest.mark.parametrize(
    ("what", "gpus", "batch"),
    [("small", 8, 16), ("long", 8, 8), ("sparse", 4, 8), ("small", 6, 12), ("narrow", 8, 8), ("small", 1, 4)],
)
def test_the_best_is_that_of_brute_force(what: str, gpus: int, batch: int) -> None:
    """In so much memory that one or other recomputation, zero 3 or pipeline is what makes the best one fit."""
    for gigabytes in (5.5, 5.7, 5.9, 6, 6.1, 6.2, 6.3, 6.4, 6.5, 6.6, 6.7, 6.8, 7, 7.4, 8, 9, 14, 80):
        known = [step_s for step_s, held in brute(what, gpus, batch) if held <= 0.96e9 * gigabytes]
        found = ranking.ranked(model(BRUTE[what]), train(batch), small(gpus, gigabytes), count=1)
        assert [plan.estimate.step_s for plan in found] == pytest.approx(sorted(known)[:1], rel=1e-12), gigabytes


@pytest.mark.parametrize(
    ("what", "gpu", "gpus", "batch"),
    [
        ("llama3-405b", "H100", 16_384, 2048),
        ("llama3-405b", "H100", 16_384, 16_384),
        ("deepseek-v3", "H800", 16_384, 15_360),
        ("mixtral-8x7b", "H100", 16_384, 16_384),
    ],
)
def test_sixteen_thousand_gpus_in_two_seconds(what: str, gpu: str, gpus: int, batch: int) -> None:
    """Processor time, so that neighbours don't count."""
    start = time.process_time()
    assert ranking.ranked(model(what), train(batch), Cluster.of(gpu, gpus))
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("strange", "gpus", "batch"),
    [
        ({"layers": 99_840, "hidden": 8, "heads": 1, "seq_len": 1}, 65_536, 10**6),
        ({"layers": 240, "hidden": 1024, "heads": 64, "seq_len": 1024,
          "experts": {"count": 55_440, "top_k": 1, "hidden": 64}}, 40_320, 161_280),  # numbers of many divisors
    ],
)  # fmt: skip
def test_a_strange_model_is_bounded(strange: dict[str, Any], gpus: int, batch: int) -> None:
    start = time.process_time()
    assert ranking.ranked(model(strange), train(batch), Cluster.of("H100", gpus))
    assert time.process_time() - start < 15


def test_compiled_blocks_and_reductions_in_bf16_count() -> None:
    cluster, spec, layout = Cluster.of("A100", 64), model("llama3-8b"), ParallelLayout(dp=8, tp=8)
    plain, compiled, bf16 = (
        ranking.estimate(layout, spec, train(64, **fields), cluster).estimate.step_s
        for fields in ({}, {"compile": True}, {"reduce_dtype": "bf16"})
    )
    assert compiled < plain
    assert bf16 < plain


def test_nothing_fits_what_is_too_small() -> None:
    cluster, spec = Cluster.of("H100", 8), model("llama3-70b")
    assert ranking.ranked(spec, train(64), cluster) == ()
    lean = ranking.leanest(spec, train(64), cluster)
    assert lean is not None
    assert lean[1] > cluster.gpu.memory
    more = ranking.enough(spec, train(64), cluster)
    assert more == 24
    assert ranking.ranked(spec, train(64), dataclasses.replace(cluster, gpus=more))
    assert not ranking.ranked(spec, train(64), dataclasses.replace(cluster, gpus=16))


def test_what_fits_nowhere_is_known_soon() -> None:
    """Neither a model too large for a million devices nor a sequence too long for any keeps a caller waiting."""
    huge = model({"layers": 256, "hidden": 10**7, "heads": 64, "seq_len": 64, "vocab_size": 256})
    sparse = {"count": 65_536, "top_k": 1, "hidden": 64}
    long = model({"layers": 256, "hidden": 64, "heads": 64, "head_dim": 2, "seq_len": 10**10, "experts": sparse})
    start = time.process_time()
    for spec in (huge, long):
        assert ranking.enough(spec, train(10**6), Cluster.of("H100", 16_384)) is None
    assert time.process_time() - start < 5


def test_where_no_size_is_legal_there_is_no_leanest() -> None:
    assert ranking.leanest(model(SMALL), train(2), Cluster.of("H100", 7)) is None
    assert ranking.enough(model({**SMALL, "layers": 1, "heads": 1, "kv_heads": 1, "hidden": 60_000}), train(1),
                          Cluster.of("V100", 1)) is None  # fmt: skip
