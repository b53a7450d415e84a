"""The gate of every merge: any layout gives the loss, the raw gradients and the parameters of one process.

float64 with SGD, which shows the gradient's scale, and AdamW; float32 with SGD. Each row of `rows` is one run.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.grid.rows import GRID, Row, changes, name, values
from tests.pool import Pool
from tests.workers import compare, runs

pytestmark = pytest.mark.torch

TOLERANCE = {"float64": 1e-9, "fp32": 1e-5}


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    """What one process gave, by the changes of train and model."""
    return {}


@pytest.mark.parametrize("row", GRID, ids=map(name, GRID))
def test_a_layout_equals_one_process(pool: Pool, references: dict[str, dict[str, Any]], row: Row) -> None:
    key = repr(changes(row))
    if key not in references:
        references[key] = pool.run(1, runs.check, runs.spec(**changes(row)))[0]
    run = runs.spec(layout=row[0], **changes(row))
    results = pool.run(run.parallel.world, runs.check, run)
    compare.same(results, references[key], TOLERANCE[run.train.precision])


def test_every_value_of_every_dimension_occurs_three_times() -> None:
    rare = {dimension: {v: n for v, n in counts.items() if n < 3} for dimension, counts in values().items()}
    assert not {dimension: found for dimension, found in rare.items() if found}
    assert len(GRID) >= 60
