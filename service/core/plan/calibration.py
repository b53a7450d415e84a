"""Figures of a device that was probed: those of the hardware table, scaled by estimated over measured seconds.

Each part of the cost model has its own scale: products, attention, memory, and links inside a node. A part's scale is
that of the sum of its seconds, so that large sizes count for most. Network cards are not probed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from service.contracts.errors import UserError
from service.core.plan import hardware, kernels, kinds, network
from service.core.plan.cluster import Cluster
from service.core.plan.hardware import Gpu, Reached
from service.core.plan.kinds import Figures
from service.core.plan.stack import OWN
from workers.timings import AllReduce, Probe

HINT = "phalanx plan calibrate makes one"

STANDS_FOR = {"fp16": "bf16", "float64": "fp32"}
"""The precision that is asked for where one was not probed."""


def parse(value: Any) -> Probe:
    """What a file has; UserError names the field."""
    if not isinstance(value, dict):
        raise UserError("probe: a probe is a mapping of fields", hint=HINT, field="probe")
    try:
        return Probe.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(["probe", *map(str, first["loc"])])
        raise UserError(f"{field}: {first['msg']}", hint=HINT, field=field) from None


def figures(own: Gpu) -> Figures:
    """As the hardware table, but for a device that was probed."""

    def find(name: str) -> Gpu | None:
        found = hardware.find(name)
        return own if found is not None and found.name == own.name else kinds.known(name)

    return find


def gpu(probe: Probe, precision: str) -> Gpu:
    """The probed device, for jobs of this precision. UserError where the table has no such device, or the probe no such
    precision."""
    base = hardware.find(probe.device)
    if base is None:
        raise UserError(
            f"the probe is of a {probe.device}, of which no figures are known",
            hint=f"known are {', '.join(hardware.GPUS)}",
            field="probe.device",
        )
    if base.family == "cpu":  # no data sheet: what products reach at best stands for its peak
        fastest = max(product.flops / product.seconds for product in probe.products)
        base = dataclasses.replace(base, peak=fastest, memory=probe.memory)
    return dataclasses.replace(base, reached=_reached(probe, precision, base))


def _reached(probe: Probe, precision: str, base: Gpu) -> Reached:
    wanted = _probed(probe, precision)
    device = kernels.device(base, OWN, wanted)
    link, latency = _links(probe.all_reduces, base)
    return Reached(
        products=_speed(
            [one for one in probe.products if one.precision == wanted],
            lambda one: device.product_s(one.m, one.n, one.k),
        ),
        attention=_speed(
            [one for one in probe.attention if one.precision == wanted],
            lambda one: sum(device.attention_s(one.samples, one.heads, one.tokens, one.tokens, (one.dim, one.dim))),
        ),
        memory=_speed(probe.copies, lambda one: device.move_s(2 * one.bytes)),
        nvlink=link,
        latency=latency,
    )


def _probed(probe: Probe, precision: str) -> str:
    there = {one.precision for one in probe.products} & {one.precision for one in probe.attention}
    wanted = precision if precision in there else STANDS_FOR.get(precision, precision)
    if wanted not in there:
        raise UserError(
            f"the probe has nothing in {precision}, only {', '.join(sorted(there)) or 'products without attention'}",
            hint=f"set train.precision to one of these, or probe again: {HINT}",
            field="probe.products",
        )
    return wanted


def _speed(timed: Sequence[Any], estimated_s: Callable[[Any], float]) -> float:
    measured_s: float = sum(one.seconds for one in timed)
    return sum(map(estimated_s, timed)) / measured_s


def _links(timed: Sequence[AllReduce], base: Gpu) -> tuple[float, float]:
    """Bandwidth by the largest all-reduce, latency by the smallest; the table's where there is one size or none."""
    if not timed:
        return 1.0, 1.0
    small, large = (choose(timed, key=lambda one: one.bytes) for choose in (min, max))
    bus = network.bus(Cluster(base, large.ranks, domain=large.ranks), OWN, large.ranks, 1)
    bandwidth = bus.all_reduce_s(large.bytes) / large.seconds
    return bandwidth, small.seconds / bus.all_reduce_s(small.bytes) if small.bytes < large.bytes else 1.0
