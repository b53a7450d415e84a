"""What a probe says of a device, and what plans make of it. Probes here are what the cost model itself estimates."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from service.contracts.cluster import Fleet, Node
from service.contracts.errors import UserError
from service.core.plan import calibration, hardware, kernels, kinds, network, shape
from service.core.plan.cluster import Cluster
from service.core.plan.cost import Estimate, Estimator
from service.core.plan.hardware import TABLE, Reached
from service.core.plan.layout import Layout
from service.core.plan.stack import OWN
from workers.models.spec import ModelSpec
from workers.timings import Probe

LLAMA = shape.of(ModelSpec(preset="llama3-8b"))
LAYOUT = Layout(dp=1, pp=1, tp=8, micro_batch=2)


def made(name: str = "H100-80GB", precision: str = "bf16", **slower: float) -> dict[str, Any]:
    """What a probe would find of a device that is as the table says, but for parts that take so many times as long."""
    gpu = hardware.GPUS[name]
    device = kernels.device(gpu, OWN, precision)
    bus = network.bus(Cluster(gpu, 8, domain=8), OWN, 8, 1)
    sizes = [(m, n, k) for m in (1024, 4096) for n, k in ((6144, 4096), (28_672, 4096))]
    times = {"products": 1.0, "attention": 1.0, "memory": 1.0, "nvlink": 1.0, "latency": 1.0} | slower

    def all_reduce(bytes_: int) -> dict[str, float]:
        late = 2 * bus.latency_s * times["latency"]
        seconds = late + (bus.all_reduce_s(bytes_) - 2 * bus.latency_s) * times["nvlink"]
        return {"ranks": 8, "bytes": bytes_, "seconds": seconds}

    return {
        "version": 1,
        "device": name,
        "memory": 80e9,
        "products": [
            {"precision": precision, "m": m, "n": n, "k": k, "seconds": device.product_s(m, n, k) * times["products"]}
            for m, n, k in sizes
        ],
        "attention": [
            {
                "precision": precision, "samples": 1, "heads": 8, "tokens": 4096, "dim": 128,
                "seconds": sum(device.attention_s(1, 8, 4096, 4096, (128, 128))) * times["attention"],
            }
        ],
        "copies": [{"bytes": 2**30, "seconds": device.move_s(2**31) * times["memory"]}],
        "all_reduces": [all_reduce(4), all_reduce(2**34)],
    }  # fmt: skip


def reached(precision: str = "bf16", **slower: float) -> Reached:
    return calibration.gpu(calibration.parse(made(**slower)), precision).reached


def estimate(probe: dict[str, Any] | None, precision: str = "bf16") -> Estimate:
    cluster = Cluster.of("H100-80GB", 8)
    if probe is not None:
        cluster = dataclasses.replace(cluster, gpu=calibration.gpu(calibration.parse(probe), precision))
    return Estimator(LLAMA, 16, cluster, OWN, precision).estimate(LAYOUT)


@pytest.mark.parametrize("part", [field.name for field in dataclasses.fields(Reached)])
def test_each_part_has_its_own_scale(part: str) -> None:
    found = dataclasses.asdict(reached(**{part: 2.0}))
    scale = found.pop(part)
    assert scale == pytest.approx(2.0 if part == "latency" else 0.5, rel=0.01)
    assert all(value == pytest.approx(1, rel=0.01) for value in found.values()), found


def test_a_machine_that_is_as_the_table_says_changes_no_plan() -> None:
    assert estimate(made()).parts == pytest.approx(estimate(None).parts, rel=0.01)


@pytest.mark.parametrize(
    ("probed", "part"),
    [("products", "products"), ("attention", "attention"), ("memory", "memory"), ("nvlink", "tp")],
)
def test_what_takes_twice_as_long_does_so_in_a_plan_and_nothing_else(probed: str, part: str) -> None:
    before, after = estimate(None).parts, estimate(made(**{probed: 2.0})).parts
    assert after[part] == pytest.approx(2 * before[part], rel=0.05)
    others = {"products", "attention", "memory", "tp"} - {part}
    for other in others:
        assert after[other] == pytest.approx(before[other], rel=0.01), other


def test_half_the_flops_make_a_slower_step_at_a_lower_mfu() -> None:
    before, after = estimate(None), estimate(made(products=2.0, attention=2.0))
    assert 1.5 < after.step_s / before.step_s < 2
    assert after.mfu == pytest.approx(before.mfu * before.step_s / after.step_s)


def test_large_sizes_count_for_most() -> None:
    probe = made()
    probe["products"].append({"precision": "bf16", "m": 1, "n": 8, "k": 8, "seconds": 1e-4})
    scale = calibration.gpu(calibration.parse(probe), "bf16").reached.products
    assert 0.9 < scale < 1


@pytest.mark.parametrize(
    ("probed", "asked"), [("bf16", "bf16"), ("bf16", "fp16"), ("fp32", "fp32"), ("fp32", "float64")]
)
def test_a_precision_that_was_not_probed_goes_by_one_that_is_like_it(probed: str, asked: str) -> None:
    probe = calibration.parse(made(precision=probed, products=2.0))
    assert calibration.gpu(probe, asked).reached.products == pytest.approx(0.5, rel=0.01)


def test_without_links_the_table_has_them() -> None:
    alone = calibration.parse(made() | {"all_reduces": []})
    found = calibration.gpu(alone, "bf16").reached
    assert (found.nvlink, found.latency) == (1, 1)


def test_a_cpu_has_the_peak_and_the_memory_that_were_probed() -> None:
    probe = calibration.parse(made("cpu", "fp32") | {"memory": 7e9})
    found = calibration.gpu(probe, "fp32")
    assert found.memory == 7e9
    assert found.peak == max(one.flops / one.seconds for one in probe.products)
    assert kernels.device(found, OWN, "fp32").peak == pytest.approx(
        kernels.device(hardware.GPUS["cpu"], OWN, "fp32").peak, rel=0.01
    )


@pytest.mark.parametrize(
    ("probed", "node", "found"),
    [
        ("H100-80GB", Node("a", "a", 8, device="gpu", accelerator="NVIDIA H100 80GB HBM3"), "H100-80GB"),
        ("H100-80GB", Node("a", "a", 8, device="gpu", accelerator="A100"), None),
        ("H100-80GB", Node("a", "a", 8), None),
        ("cpu", Node("a", "a", 8), "cpu"),
    ],
)
def test_only_what_was_probed_has_other_figures(probed: str, node: Node, found: str | None) -> None:
    precision = "fp32" if probed == "cpu" else "bf16"
    own = calibration.gpu(calibration.parse(made(probed, precision)), precision)
    mine = [
        kind.gpu.name for kind in kinds.of(Fleet((node,)), node.device, calibration.figures(own)) if kind.gpu is own
    ]
    assert mine == ([found] if found else [])
    usual = [kind.gpu.reached for kind in kinds.of(Fleet((node,)), node.device)]
    assert usual == [TABLE] * (node.device == "gpu")


@pytest.mark.parametrize(
    ("value", "field", "says"),
    [
        ([], "probe", "a mapping of fields"),
        ({}, "probe.device", "Field required"),
        (made() | {"products": []}, "probe.products", "at least 1"),
        (made() | {"copies": [{"bytes": 1, "seconds": 0}]}, "probe.copies.0.seconds", "greater than 0"),
        (made() | {"copies": [{"bytes": 1, "seconds": float("nan")}]}, "probe.copies.0.seconds", "finite"),
        (made() | {"version": 2}, "probe.version", "1"),
        (made() | {"colour": "red"}, "probe.colour", "Extra inputs"),
    ],
)
def test_a_broken_probe_names_its_field(value: object, field: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as told:
        calibration.parse(value)
    assert told.value.field == field
    assert "calibrate" in told.value.hint


@pytest.mark.parametrize(
    ("change", "precision", "says"),
    [
        ({"device": "Abacus 3"}, "bf16", "the probe is of a Abacus 3, of which no figures are known"),
        ({}, "fp32", "the probe has nothing in fp32, only bf16"),
    ],
)
def test_a_probe_that_says_nothing_of_the_job_is_refused(change: dict[str, Any], precision: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        calibration.gpu(Probe.model_validate(made() | change), precision)
