"""The gate of every merge: any layout gives the loss, the raw gradients and the parameters of one process.

float64 with SGD, which shows the gradient's scale, and AdamW where nothing else is named. Each row is one run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.pool import Pool
from tests.workers import runs

pytestmark = pytest.mark.torch

ADAM = {"optimizer": "adamw", "learning_rate": 1e-2}
SEVEN = {"global_batch": 7}  # 7 micro-batches: 3, 2, 2 on three replicas
TIED = {"tied_embedding": True}
ONE_KV = {"kv_heads": 1}

# layout, changes of train, changes of model
GRID: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"tp": 2}, ADAM, {}),
    ({"tp": 2, "sequence_parallel": False}, {}, {}),
    ({"tp": 4}, {}, ONE_KV),
    ({"tp": 4, "sequence_parallel": False, "recompute": "selective"}, {}, ONE_KV),
    ({"tp": 2, "dp": 2, "zero": 3}, {}, TIED),
    ({"tp": 2, "dp": 4, "replicate": 2}, {}, {}),
    ({"dp": 2, "replicate": 2}, ADAM, {}),
    ({"dp": 2, "zero": 2}, {}, {}),
    ({"dp": 4, "zero": 3, "recompute": "full"}, ADAM, {}),
    ({"dp": 3}, SEVEN, {}),
    ({"dp": 3, "zero": 2}, SEVEN, {}),
    ({"dp": 3, "zero": 3}, SEVEN, TIED),
    ({"dp": 3, "pp": 2}, SEVEN, {}),
    ({"dp": 3, "pp": 2, "zero": 3}, SEVEN, {}),
    ({"pp": 2, "schedule": "gpipe"}, SEVEN, TIED),
    ({"pp": 2, "micro_batch": 3, "recompute": "full"}, {"global_batch": 12}, {}),
    ({"pp": 4}, {"global_batch": 2}, {}),
    ({"pp": 3, "stage_layers": (2, 2, 0)}, {}, TIED),
    ({"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "dp": 2}, SEVEN, {}),
    ({"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "dp": 2, "zero": 2}, {}, {}),
    ({"pp": 2, "vpp": 2, "schedule": "interleaved_zb"}, SEVEN, {}),
    ({"pp": 2, "vpp": 2, "schedule": "interleaved_zb", "dp": 2, "tp": 2}, ADAM, {}),
    ({"pp": 2, "vpp": 2, "schedule": "zbv", "dp": 2}, SEVEN, TIED),
    ({"pp": 2, "vpp": 2, "schedule": "zbv", "dp": 2, "tp": 2, "recompute": "full"}, ADAM, {}),
    ({"pp": 2, "tp": 2, "dp": 2, "zero": 3, "recompute": "selective"}, {}, TIED),
    ({"pp": 2, "tp": 2, "dp": 2, "replicate": 2, "schedule": "gpipe"}, {}, ONE_KV),
]


def name(row: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> str:
    return " ".join(f"{key}={value}" for part in row for key, value in part.items())


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    """What one process gave, by the changes of train and model."""
    return {}


@pytest.mark.parametrize(("layout", "train", "model"), GRID, ids=map(name, GRID))
def test_a_layout_equals_one_process(
    pool: Pool, references: dict[str, dict[str, Any]], layout: dict, train: dict, model: dict
) -> None:
    changes = {"train": {"optimizer": "sgd", "learning_rate": 0.5, "global_batch": 4, **train}, "model": model}
    if (key := repr(changes)) not in references:
        references[key] = pool.run(1, runs.check, runs.spec(**changes))[0]
    alone, run = references[key], runs.spec(layout=layout, **changes)
    results = pool.run(run.parallel.world, runs.check, run)

    for result in results:  # every rank knows the true figures
        assert result["first"] == pytest.approx(alone["first"], rel=1e-9)
        np.testing.assert_allclose(result["outcomes"], alone["outcomes"], rtol=1e-9)
    for kind in ("gradients", "tensors"):
        many, one = runs.merged(results, kind), runs.merged([alone], kind)
        assert many.keys() == one.keys()
        for tensor, value in many.items():
            tolerance = 1e-9 * np.abs(one[tensor]).max()
            np.testing.assert_allclose(value, one[tensor], rtol=0, atol=tolerance, err_msg=f"{kind} {tensor}")
