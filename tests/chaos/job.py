"""The job that goes through storms: small, in float64, on four slots."""

from __future__ import annotations

from typing import Any

LAYOUT = {"dp": 2, "pp": 1, "tp": 2}


def spec(steps: int, slots: int = 4, layout: dict[str, int] = LAYOUT, **sections: dict[str, Any]) -> dict[str, Any]:
    """A snapshot every step; `sections` change single fields."""
    whole: dict[str, dict[str, Any]] = {
        "model": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 48, "seq_len": 16},
        "data": {},
        "train": {"steps": steps, "global_batch": 8, "learning_rate": 1e-2, "precision": "float64", "seed": 3},
        "parallel": layout,
        "resources": {"device": "cpu", "slots": slots, "elastic": {"min_slots": slots // 2}, "spares": 1},
        "checkpoint": {"every_steps": 20, "snapshot_every": 1},
        "budgets": {"infrastructure": 1000, "hang": 1000, "user_error": 1000},
    }
    return {"name": "storm"} | {name: fields | sections.get(name, {}) for name, fields in whole.items()}
