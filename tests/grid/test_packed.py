"""Packed documents under every kind of layout give what one process gives; so does a mixture of sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.grid.rows import ADAM, DEEP, GPT, LOOPED, OWN, SEVEN, WHOLE, ZERO_BUBBLE, Row, V, changes, name
from tests.pool import Pool
from tests.workers import compare, runs

pytestmark = pytest.mark.torch

PACKED: list[Row] = [
    ({"tp": 2}, {}, {}),
    ({"tp": 4, "dp": 2} | WHOLE, ADAM, GPT),
    ({"dp": 3, "zero": 3, "recompute": "full"}, SEVEN, {}),
    ({"pp": 2, "tp": 2, "dp": 2, "recompute": "selective"}, {}, GPT),
    ({"pp": 4}, {}, OWN),
    (LOOPED | {"dp": 2, "zero": 2}, {}, {}),
    (ZERO_BUBBLE | {"tp": 2}, SEVEN, {}),
    (V | {"dp": 2, "tp": 2, "recompute": "inner"}, {}, {}),
    ({"ep": 2, "dp": 2, "pp": 2}, {}, DEEP),
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two sources of short documents of many lengths, packed."""
    place = tmp_path_factory.mktemp("text")
    for file, word in (("a", "one"), ("b", "two three")):
        texts = [f"{word} {n}"[: 2 + n % 23] for n in range(300)]
        (place / f"{file}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    sources = [{"source": str(Path(place) / "a.jsonl"), "weight": 2.0}, {"source": str(Path(place) / "b.jsonl")}]
    return {"sources": sources, "packing": "documents"}


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    return {}


@pytest.mark.parametrize("row", PACKED, ids=map(name, PACKED))
def test_a_layout_equals_one_process(
    pool: Pool, references: dict[str, dict[str, Any]], data: dict[str, Any], row: Row
) -> None:
    key = repr(changes(row))
    if key not in references:
        references[key] = pool.run(1, runs.check, runs.spec(data=data, **changes(row)))[0]
    run = runs.spec(layout=row[0], data=data, **changes(row))
    compare.same(pool.run(run.parallel.world, runs.check, run), references[key])
    assert references[key]["first"][2] < run.train.global_batch * run.model.seq_len  # some positions only fill
