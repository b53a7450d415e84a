"""A body for each request that has one, as the OpenAPI document shows it. Each is accepted as it stands."""

from __future__ import annotations

from typing import Any

JOB: dict[str, Any] = {
    "name": "topics",
    "model": {"layers": 4, "hidden": 64, "heads": 4, "seq_len": 64},
    "data": {"source": "builtin:topics"},
    "train": {"steps": 100, "global_batch": 8, "learning_rate": 3e-3},
    "parallel": "auto",
    "resources": {"device": "cpu", "slots": 4, "elastic": {"min_slots": 2}},
    "checkpoint": {"every_steps": 20},
    "labels": {"team": "vision"},
}

BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("post", "/v1/jobs"): JOB,
    ("patch", "/v1/jobs/{uid}"): {
        "priority": 10,
        "resources": {"elastic": {"min_slots": 2, "max_slots": 8}},
        "checkpoint": {"keep": 5},
    },
    ("post", "/v1/jobs/{uid}:rescale"): {"slots": 2},
    ("post", "/v1/jobs/{uid}:restart"): {"step": 20, "skip_samples": 64},
    ("post", "/v1/jobs/{uid}/checkpoints/{step}:export"): {"to": "/srv/phalanx/runs/exported"},
    ("post", "/v1/jobs/{uid}:fork"): {"step": 20, "overrides": {"train": {"learning_rate": 1e-3}}},
    ("post", "/v1/plan"): {"job": JOB, "fleet": {"device": "cpu", "racks": [{"nodes": 4, "slots": 8, "count": 2}]}},
    ("post", "/v1/queues"): {"name": "urgent", "priority": 10},
    ("put", "/v1/queues/{name}"): {"priority": 20},
    ("post", "/v1/projects"): {"name": "vision", "slots": 64},
    ("put", "/v1/projects/{name}/quota"): {"slots": 128},
    ("post", "/v1/tokens"): {"name": "ci", "scope": "submit", "lasts_s": 2592000},
    ("post", "/v1/hooks"): {"url": "https://hooks.example.org/phalanx", "secret": "env:HOOK_KEY"},
}
