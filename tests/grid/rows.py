"""The layouts of the grid as (layout, changes of train, changes of model), and which values each dimension has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.workers import runs

Row = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]

ADAM = {"optimizer": "adamw", "learning_rate": 1e-2}
SINGLE = {"precision": "fp32"}
SEVEN = {"global_batch": 7}  # 7 micro-batches: 3, 2, 2 on three replicas
TIED = {"tied_embedding": True}
ONE_KV, ALL_KV = {"kv_heads": 1}, {"kv_heads": 8}
EXPERTS = {"experts": {"count": 4, "top_k": 2, "hidden": 24, "auxiliary": 0.01}}
SIX = {"experts": {"count": 6, "top_k": 2, "hidden": 16, "auxiliary": 0.01}}
DEEP = {
    "experts": {"count": 8, "top_k": 2, "hidden": 16, "shared": 16, "first_dense": 1, "score": "sigmoid", "scale": 2.5,
                "groups": 4, "top_groups": 2, "auxiliary": 0.001, "bias_rate": 0.01},
    "kv_heads": 8, "latent": {"query": 12, "key_value": 8, "plain": 4, "rotary": 2, "value": 6},
}  # fmt: skip
GPT = {"kv_heads": 8, "norm": "layer", "activation": "gelu", "positions": "learned", "bias": "all"} | TIED
QWEN = {"qk_norm": True, "bias": "qkv", "head_dim": 6}
DROPOUT = {"dropout": 0.1}
OWN = {"family": "workers.models.example:ParallelDecoder"}
WHOLE = {"sequence_parallel": False}
LOOPED = {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"}
ZERO_BUBBLE = {"pp": 2, "vpp": 2, "schedule": "interleaved_zb"}
V = {"pp": 2, "vpp": 2, "schedule": "zbv"}

GRID: list[Row] = [
    # one axis
    ({"tp": 2}, ADAM, {}),
    ({"tp": 2} | WHOLE, {}, {}),
    ({"tp": 4}, {}, ONE_KV),
    ({"tp": 4, "recompute": "selective"} | WHOLE, {}, ONE_KV),
    ({"tp": 4}, {"global_batch": 2}, QWEN),
    ({"tp": 4} | WHOLE, {}, GPT),
    ({"tp": 8}, {"global_batch": 1}, ALL_KV | TIED),
    ({"tp": 8} | WHOLE, {"global_batch": 3}, ONE_KV),
    ({"tp": 8}, ADAM, {}),
    ({"dp": 2, "replicate": 2}, ADAM, {}),
    ({"dp": 2, "zero": 2}, {}, {}),
    ({"dp": 4, "zero": 3, "recompute": "full"}, ADAM, {}),
    ({"dp": 8}, {"global_batch": 8}, ONE_KV),
    ({"dp": 8, "zero": 3}, {"global_batch": 8}, TIED),
    ({"dp": 3}, SEVEN, {}),
    ({"dp": 3, "zero": 2}, SEVEN, ALL_KV),
    ({"dp": 3, "zero": 3}, SEVEN, TIED),
    ({"dp": 3, "replica_weights": (1.0, 2.0, 1.0)}, {"global_batch": 8}, DROPOUT),
    ({"pp": 2, "schedule": "gpipe"}, SEVEN, TIED),
    ({"pp": 2, "schedule": "gpipe"}, {"global_batch": 3}, ALL_KV),
    ({"pp": 2}, {"global_batch": 1}, {}),
    ({"pp": 2, "micro_batch": 3, "recompute": "full"}, {"global_batch": 12}, {}),
    ({"pp": 4}, {"global_batch": 2}, {}),
    ({"pp": 4, "schedule": "gpipe"}, {"global_batch": 5}, TIED),
    ({"pp": 3, "stage_layers": (2, 2, 0)}, {}, TIED),
    ({"pp": 3, "stage_layers": "weighed"}, {"global_batch": 5}, {}),
    (LOOPED, {"global_batch": 5}, {"layers": 5}),
    (ZERO_BUBBLE, SEVEN, {}),
    (V | {"recompute": "inner"}, {"global_batch": 3}, ONE_KV),
    # two
    ({"tp": 2, "dp": 2, "zero": 3}, {}, TIED),
    ({"tp": 2, "dp": 4, "replicate": 2}, {}, {}),
    ({"tp": 2, "dp": 3, "zero": 2, "recompute": "inner"}, SEVEN, GPT),
    ({"tp": 4, "dp": 2} | WHOLE, {}, DROPOUT),
    ({"tp": 4, "dp": 2, "recompute": "inner"}, {}, QWEN),
    ({"tp": 2, "pp": 2, "recompute": "selective"}, {}, GPT),
    ({"tp": 2, "pp": 3, "schedule": "gpipe"}, {"global_batch": 5}, OWN),
    ({"tp": 2, "pp": 4}, ADAM, ONE_KV),
    ({"dp": 3, "pp": 2}, SEVEN, {}),
    ({"dp": 3, "pp": 2, "zero": 3}, SEVEN, {}),
    ({"dp": 2, "pp": 3, "zero": 2}, SEVEN, DROPOUT),
    (LOOPED | {"dp": 2}, SEVEN, {}),
    (LOOPED | {"dp": 2, "zero": 2}, {}, {}),
    (LOOPED | {"tp": 2, "recompute": "selective"}, {}, DROPOUT | TIED),
    (V | {"dp": 2}, SEVEN, TIED),
    (V | {"tp": 2}, {"global_batch": 1}, OWN),
    # three
    ({"pp": 2, "tp": 2, "dp": 2, "zero": 3, "recompute": "selective"}, {}, TIED),
    ({"pp": 2, "tp": 2, "dp": 2, "replicate": 2, "schedule": "gpipe"}, {}, ONE_KV),
    ({"pp": 2, "tp": 2, "dp": 2, "recompute": "inner"}, {}, QWEN | DROPOUT),
    ({"pp": 2, "tp": 2, "dp": 2}, ADAM, OWN),
    (LOOPED | {"tp": 2, "dp": 2, "zero": 3}, SEVEN, ALL_KV),
    (ZERO_BUBBLE | {"dp": 2, "tp": 2}, ADAM, {}),
    (V | {"dp": 2, "tp": 2, "recompute": "full"}, ADAM, {}),
    # experts
    ({"ep": 2, "dp": 2}, {}, EXPERTS),
    ({"ep": 2, "tp": 2}, {"global_batch": 2}, EXPERTS),
    ({"ep": 4, "dp": 4}, ADAM, DEEP),
    ({"ep": 4, "dp": 2, "tp": 2}, {}, EXPERTS),
    ({"ep": 3, "dp": 3}, SEVEN, SIX),
    ({"ep": 3, "dp": 3, "pp": 2}, SEVEN, SIX),
    ({"ep": 3, "dp": 3, "tp": 2, "zero": 3}, SEVEN, SIX),
    ({"ep": 2, "dp": 3, "tp": 2}, SEVEN, EXPERTS),
    ({"ep": 2, "dp": 4, "zero": 3, "recompute": "full"}, {}, EXPERTS),
    ({"ep": 2, "dp": 4, "replicate": 2}, {}, EXPERTS),
    ({"ep": 1, "dp": 2, "tp": 2}, {}, DEEP),
    ({"ep": 2, "dp": 2, "pp": 2, "tp": 2, "zero": 2}, {}, DEEP),
    ({"ep": 4, "dp": 2, "tp": 2, "recompute": "full"} | ZERO_BUBBLE, {}, DEEP),
    ({"ep": 2, "dp": 2, "recompute": "selective"} | LOOPED, SEVEN, EXPERTS | DROPOUT),
    ({"ep": 8, "dp": 4, "tp": 2}, ADAM, DEEP),
    ({"ep": 8, "dp": 8}, {"global_batch": 8}, DEEP),
    ({"ep": 8, "dp": 4, "tp": 2, "zero": 2}, {}, DEEP),
    ({"ep": 2, "tp": 2, "recompute": "inner"} | V, {}, EXPERTS),
    # float32
    ({"tp": 2, "dp": 2}, SINGLE, {}),
    ({"pp": 2, "dp": 2, "tp": 2}, SINGLE, TIED),
    ({"dp": 3, "zero": 3}, SINGLE | SEVEN, ONE_KV),
    (LOOPED | {"tp": 2}, SINGLE, GPT),
    (V | {"dp": 2}, SINGLE, {}),
    ({"ep": 4, "dp": 2, "tp": 2}, SINGLE, DEEP),
    ({"ep": 2, "dp": 2, "pp": 2}, SINGLE, EXPERTS),
    (ZERO_BUBBLE | {"dp": 2}, SINGLE | SEVEN, QWEN),
]  # fmt: skip


def changes(row: Row) -> dict[str, Any]:
    """Of `runs.spec`, but for the layout."""
    _, train, model = row
    return {"train": {"optimizer": "sgd", "learning_rate": 0.5, "global_batch": 4, **train}, "model": model}


def name(row: Row) -> str:
    layout, train, model = row
    flat = {**layout, **train, **model}
    return " ".join(f"{key}={'...' if isinstance(value, dict) else value}" for key, value in flat.items())


def values() -> dict[str, Counter[Any]]:
    """How often each value of each dimension occurs."""
    counts: dict[str, Counter[Any]] = {}
    for row in GRID:
        for dimension, value in _values(row):
            counts.setdefault(dimension, Counter())[value] += 1
    return counts


def _values(row: Row) -> Iterator[tuple[str, Any]]:
    run = runs.spec(layout=row[0], **changes(row))
    layout, model = run.parallel, run.model
    for dimension in ("dp", "pp", "tp", "ep", "schedule", "zero", "recompute"):
        yield dimension, getattr(layout, dimension)
    yield "micro-batches", run.train.global_batch // layout.micro_batch
    yield "tied", model.tied_embedding
    yield "kv heads", model.kv_heads
    yield "precision", run.train.precision
    yield "optimizer", run.train.optimizer
