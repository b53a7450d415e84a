"""What is said of a layout without building it is what engines of that layout hold, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.grid import rows
from tests.pool import Pool
from tests.workers import runs
from workers.checkpoint import boxes, logical
from workers.data.corpus import Corpus
from workers.engine import Engine
from workers.parallel import mesh
from workers.parallel.holdings import Held, Holdings
from workers.spec import RunSpec

pytestmark = pytest.mark.torch

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # layout, changes of train, changes of model
    "one rank": ({}, {}, {}),
    "dp 3": ({"dp": 3}, {}, {}),
    "dp 8, zero 3": ({"dp": 8, "zero": 3}, {}, rows.TIED),
    "dp 3 x pp 2, zero 2, no optimizer state": ({"dp": 3, "pp": 2, "zero": 2}, {"optimizer": "sgd"}, {}),
    "tp 4 of one key head": ({"tp": 4, "dp": 2}, {}, rows.ONE_KV),
    "tp 8, the sequence whole": ({"tp": 8} | rows.WHOLE, {}, rows.QWEN | rows.ONE_KV),
    "two copies": ({"tp": 2, "dp": 4, "replicate": 2}, {"optimizer": "sgd", "momentum": 0.9}, rows.TIED),
    "copies alone": ({"dp": 2, "replicate": 2}, {}, {}),
    "uneven stages": ({"pp": 3, "dp": 2, "stage_layers": (2, 2, 0)}, {}, rows.TIED),
    "weighed stages": ({"pp": 3, "stage_layers": "weighed", "tp": 2}, {"precision": "bf16"}, rows.GPT),
    "looped": (rows.LOOPED | {"tp": 2, "dp": 2, "zero": 3}, {}, {"layers": 5}),
    "v": (rows.V | {"dp": 2, "tp": 2}, {}, rows.TIED),
    "a model of one's own": ({"dp": 2, "tp": 2, "pp": 2}, {}, rows.OWN),
    "experts over replicas": ({"ep": 3, "dp": 3, "tp": 2, "zero": 3}, {}, rows.SIX),
    "experts over half": ({"ep": 2, "dp": 4, "tp": 2, "replicate": 2}, {}, rows.EXPERTS),
    "experts, latent attention": ({"ep": 4, "dp": 2, "pp": 2, "tp": 2}, {"precision": "bf16"}, rows.DEEP),
    "experts whole": ({"ep": 1, "dp": 2, "tp": 2}, {}, rows.DEEP),
}


def run_of(name: str) -> RunSpec:
    layout, train, model = LAYOUTS[name]
    return runs.spec(layout=layout, train=train, model=model)


def held(store: dist.Store, rank: int, run: RunSpec) -> tuple[dict[str, Held], dict[str, Held]]:
    """What an engine of this rank has, and what it would fill."""
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, "cpu", 60.0) as axes:
        engine = Engine(run, corpus.vocabulary, axes, torch.device("cpu"))
        filled: dict[str, torch.Tensor] = {}
        engine.restore(filled.update, engine.progress())
        return told(engine.state(), engine.slices(filled)), told(filled, engine.slices(filled))


def told(state: dict[str, torch.Tensor], slices: dict[str, int]) -> dict[str, Held]:
    """As the tensors say it themselves; an engine gives no stored order for a copy, which it doesn't store."""
    return {
        name: Held(
            tuple(tensor.shape), logical._dtype(tensor), slices.get(name, 0), logical._box(name, tensor, owner=False)
        )
        for name, tensor in state.items()
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_what_engines_hold(pool: Pool, name: str) -> None:
    run = run_of(name)
    holdings = Holdings(run, Corpus(run.data, run.model.seq_len, run.train.seed).vocabulary)
    for rank, (state, filled) in enumerate(pool.run(run.parallel.world, held, run)):
        assert holdings.of(rank) == state
        mine = holdings.filled(rank)
        assert mine.keys() == filled.keys()
        assert {key: one.wanted for key, one in mine.items()} == {key: one.wanted for key, one in filled.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_element_is_kept_once(name: str) -> None:
    run = run_of(name)
    holdings, counts = Holdings(run, 257), {}
    for rank in range(run.parallel.world):
        for key, one in holdings.of(rank).items():
            count = counts.setdefault(key, torch.zeros(one.shape, dtype=torch.int64))
            for offset, extent in boxes.tiles(one.box, one.slice, 8) if one.box.kept else []:
                count[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))] += 1
    assert all((count == 1).all() for count in counts.values())
