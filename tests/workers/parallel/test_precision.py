"""The loss scale: halved by what is not finite, doubled by many good steps, within its bounds, and kept."""

from __future__ import annotations

import pytest

from workers.parallel.precision import LossScale

pytestmark = pytest.mark.torch


def after(steps: list[bool], scale: LossScale | None = None) -> LossScale:
    scale = scale or LossScale("fp16")
    for finite in steps:
        scale.update(finite)
    return scale


@pytest.mark.parametrize(
    ("steps", "value", "good"),
    [
        ([], 2.0**16, 0),
        ([False], 2.0**15, 0),
        ([True] * 999, 2.0**16, 999),
        ([True] * 1000, 2.0**17, 0),
        ([True] * 999 + [False] + [True] * 999, 2.0**15, 999),
        ([False] * 40, 1.0, 0),
        ([True] * 20_000, 2.0**24, 0),
    ],
)
def test_how_it_moves(steps: list[bool], value: float, good: int) -> None:
    scale = after(steps)
    assert (scale.value, scale.good) == (value, good)
    again = LossScale("fp16")
    again.resume(scale.state())
    assert (again.value, again.good) == (value, good)


def test_at_its_least_it_excuses_nothing() -> None:
    scale = LossScale("fp16")
    assert [scale.update(False) for _ in range(18)] == [True] * 16 + [False] * 2


@pytest.mark.parametrize("precision", ["bf16", "fp32", "float64"])
def test_other_formats_have_none(precision: str) -> None:
    scale = after([False, True], LossScale(precision))  # type: ignore[arg-type]
    assert (scale.value, scale.state()) == (1.0, {})
    scale.resume({"scale": 8.0, "good": 3})  # of a checkpoint in fp16
    assert scale.value == 1.0
