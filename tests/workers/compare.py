"""Whether what many ranks computed is what one process computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.workers import runs

NOTHING = 1e-4
"""Of the largest value: what is smaller is rounding, as the gradient of a key's bias, which moves no probability."""


def same(results: list[dict[str, Any]], alone: dict[str, Any], relative: float = 1e-9) -> None:
    """Figures on every rank, raw gradients of the first step, and the state after the last."""
    for result in results:
        assert result["first"] == pytest.approx(alone["first"], rel=relative)
        np.testing.assert_allclose(result["outcomes"], alone["outcomes"], rtol=relative)
    for kind in ("gradients", "tensors"):
        same_tensors(runs.merged(results, kind), runs.merged([alone], kind), relative, kind)


def same_tensors(
    many: dict[str, np.ndarray], one: dict[str, np.ndarray], relative: float = 1e-9, kind: str = ""
) -> None:
    assert many.keys() == one.keys()
    largest = max(np.abs(value).max() for value in one.values())
    for name, value in many.items():
        tolerance = relative * max(np.abs(one[name]).max(), NOTHING * largest)
        np.testing.assert_allclose(value, one[name], rtol=0, atol=tolerance, err_msg=f"{kind} {name}")
