"""The gate of every merge: any layout gives the loss, the raw gradients and the parameters of one process.

float64 with SGD, which shows the gradient's scale, and AdamW; float32 with SGD. Each row of `rows` is one run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.grid.rows import GRID, Row, changes, name, values
from tests.pool import Pool
from tests.workers import runs

pytestmark = pytest.mark.torch

TOLERANCE = {"float64": 1e-9, "fp32": 1e-5}
NOTHING = 1e-4
"""Of the largest gradient: what is smaller is rounding, as the gradient of a key's bias, which moves no probability."""


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    """What one process gave, by the changes of train and model."""
    return {}


@pytest.mark.parametrize("row", GRID, ids=map(name, GRID))
def test_a_layout_equals_one_process(pool: Pool, references: dict[str, dict[str, Any]], row: Row) -> None:
    key = repr(changes(row))
    if key not in references:
        references[key] = pool.run(1, runs.check, runs.spec(**changes(row)))[0]
    alone, run = references[key], runs.spec(layout=row[0], **changes(row))
    results, relative = pool.run(run.parallel.world, runs.check, run), TOLERANCE[run.train.precision]

    for result in results:  # every rank knows the true figures
        assert result["first"] == pytest.approx(alone["first"], rel=relative)
        np.testing.assert_allclose(result["outcomes"], alone["outcomes"], rtol=relative)
    for kind in ("gradients", "tensors"):
        many, one = runs.merged(results, kind), runs.merged([alone], kind)
        assert many.keys() == one.keys()
        largest = max(np.abs(value).max() for value in one.values())
        for tensor, value in many.items():
            tolerance = relative * max(np.abs(one[tensor]).max(), NOTHING * largest)
            np.testing.assert_allclose(value, one[tensor], rtol=0, atol=tolerance, err_msg=f"{kind} {tensor}")


def test_every_value_of_every_dimension_occurs_three_times() -> None:
    rare = {dimension: {v: n for v, n in counts.items() if n < 3} for dimension, counts in values().items()}
    assert not {dimension: found for dimension, found in rare.items() if found}
    assert len(GRID) >= 60
