"""A training state goes from layout to layout, each up and down on every dimension, and no bit of it changes.

Each chain begins after two steps; at every link the state is read in another layout, compared, and written again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import s3
from tests.grid.rows import DEEP, EXPERTS, LOOPED, ONE_KV, TIED, ZERO_BUBBLE, V
from tests.pool import Pool
from tests.workers import cases, runs
from workers.checkpoint import manifest
from workers.checkpoint.publisher import Publisher
from workers.checkpoint.storage import Storage
from workers.reports import Resumed, ShardSaved

pytestmark = pytest.mark.torch

DENSE = [
    {}, {"dp": 2}, {"dp": 8, "zero": 3}, {"dp": 3}, {"tp": 4}, {"tp": 2, "dp": 2, "zero": 2}, {"tp": 8}, {"pp": 4},
    LOOPED | {"dp": 2}, {"pp": 2}, V | {"tp": 2, "dp": 2}, {"pp": 3, "stage_layers": (2, 2, 0)},
    {"dp": 4, "tp": 2, "replicate": 2}, ZERO_BUBBLE | {"tp": 4}, {"dp": 6}, {},
]  # fmt: skip
MIXED = [
    {}, {"dp": 2, "ep": 2}, {"dp": 4, "tp": 2, "ep": 8}, {"dp": 8, "ep": 4}, {"tp": 2, "ep": 1},
    {"pp": 2, "dp": 2, "tp": 2, "ep": 4, "zero": 3}, {"dp": 4, "replicate": 2, "ep": 2}, V | {"dp": 2, "ep": 2}, {},
]  # fmt: skip
CHAINS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    # layouts, changes of train, changes of model
    "dense": (DENSE, {}, {}),
    "tied": (DENSE, {"optimizer": "sgd", "momentum": 0.9}, TIED),
    "one key head, fp16": (DENSE, {"precision": "fp16"}, ONE_KV),
    "experts": (MIXED, {}, EXPERTS | {"experts": EXPERTS["experts"] | {"count": 8}}),
    "latent attention, bf16": (MIXED, {"precision": "bf16"}, DEEP),
}


def carry(pool: Pool, root: str, chain: str, layouts: list[dict[str, Any]], place: dict[str, str]) -> None:
    _, train, model = CHAINS[chain]
    storage, first, resume = Storage.open(root).child("run"), {}, ()
    for step, layout in enumerate(layouts, 2):
        run = runs.spec(layout=layout, train=train | {"global_batch": 8}, model=model)
        results = pool.run(run.parallel.world, cases.carried, root, run, step, resume, place)
        tensors, header = runs.merged(results), results[0]["header"]
        if not first:
            first = {"tensors": tensors, "header": header}
        said = [report for result in results for report in result["said"]]
        expected = Resumed(2, resume[0]) if resume else Resumed(0, None)
        assert [report for report in said if isinstance(report, Resumed)] == [expected]
        assert header == first["header"]
        assert tensors.keys() == first["tensors"].keys()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, first["tensors"][name], err_msg=f"{name} in {layout}", strict=True)
        saved = [report for report in said if isinstance(report, ShardSaved)]
        resume = (Publisher(storage, "run", 1, "test", run).publish(step, saved),)
        manifest.verify(storage, resume[0])


@pytest.mark.parametrize("chain", CHAINS)
def test_no_bit_changes_from_layout_to_layout(pool: Pool, tmp_path: Path, chain: str) -> None:
    carry(pool, str(tmp_path), chain, CHAINS[chain][0], {})


@pytest.mark.server
def test_no_bit_changes_on_object_storage(pool: Pool) -> None:
    with s3.served("seaweed") as (uri, place):
        carry(pool, f"{uri}/runs", "experts", MIXED, place)
