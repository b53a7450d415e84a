from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from service.core.plan import hardware, reasons
from service.core.plan.cost import Estimate
from service.core.plan.memory import Bytes
from service.core.plan.ranking import Plan
from workers.spec import ParallelLayout

H100 = hardware.GPUS["H100-80GB"]
LAYOUT = ParallelLayout(dp=2, pp=2, tp=2)
ESTIMATE = Estimate(
    step_s=2.0, parts={"products": 1.5, "bubble": 0.5}, memory=(Bytes(10e9, 0, 0, 20e9, 0, 5e9),), bubble=0.25,
    flops=8e15, tokens=1e6, gpus=8, peak=1e15, fits=True,
)  # fmt: skip


def plan(**parts: float) -> Plan:
    whole = ESTIMATE.parts | parts
    return Plan(LAYOUT, dataclasses.replace(ESTIMATE, parts=whole, step_s=sum(whole.values())))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"dp": 8}, "dp 8 x pp 1 x tp 1, micro-batch 1"),
        ({"pp": 2, "micro_batch": 2}, "dp 1 x pp 2 x tp 1, 1f1b, micro-batch 2"),
        ({"dp": 2, "zero": 3, "recompute": "full"}, "dp 2 x pp 1 x tp 1, micro-batch 1, recompute full, zero 3"),
        ({"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "stage_layers": "weighed"},
         "dp 1 x pp 2 x tp 1 x vpp 2, interleaved_1f1b, micro-batch 1, weighed stages"),
    ],
)  # fmt: skip
def test_a_layout_is_described(fields: dict[str, Any], told: str) -> None:
    assert reasons.described(ParallelLayout(**fields)) == told


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({}, "as fast"),
        ({"bubble": 0.7}, "10.0% slower: bubble +0.2 s"),
        ({"bubble": 0.3}, "10.0% faster: bubble -0.2 s"),
        ({"tp": 0.5, "bubble": 0.2}, "10.0% slower: tp +0.5 s, bubble -0.3 s"),
        ({"tp": 0.3, "host": 0.001}, "15.0% slower: tp +0.3 s"),
    ],
)
def test_two_plans_are_compared_by_their_parts(parts: dict[str, float], told: str) -> None:
    assert reasons.compared(plan(**parts), plan()) == told


def test_the_best_is_told_with_its_figures_and_the_next() -> None:
    told = reasons.best((plan(), plan(bubble=1.0)), H100)
    assert told == (
        "dp 2 x pp 2 x tp 2, 1f1b, micro-batch 1: 2 s a step, MFU 50.0%, 35 of 80 GB on the fullest H100-80GB; "
        "the next best is dp 2 x pp 2 x tp 2, 1f1b, micro-batch 1 with 2.5 s"
    )
    assert reasons.best((plan(),), H100).endswith("no other layout fits and can be placed")


@pytest.mark.parametrize(
    ("more", "there", "told"),
    [
        (16, 32, "resources.slots 16 would do"),
        (64, 32, "resources.slots 64 would do, and the fleet has 32 of these"),
        (None, 32, "a smaller model or seq_len would fit"),
    ],
)
def test_what_would_be_enough(more: int | None, there: int, told: str) -> None:
    assert reasons.enough(more, there) == told
