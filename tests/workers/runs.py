"""What the pool's processes run: an engine over some steps, or the whole trainer; tensors come back whole."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from workers import trainer
from workers.data.corpus import Corpus
from workers.engine import Engine, NonFinite
from workers.parallel import mesh
from workers.reports import Report
from workers.spec import Assignment, RunSpec

logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # gathering whole tensors is slow

MODEL = {"layers": 4, "hidden": 32, "heads": 8, "kv_heads": 2, "ffn_hidden": 48, "seq_len": 16}
TRAIN = {"steps": 3, "global_batch": 12, "learning_rate": 1e-2, "precision": "float64", "seed": 5}


def spec(**changes: Any) -> RunSpec:
    """A tiny run in float64; `layout`, `train`, `model` and `checkpoint` change single fields."""
    return RunSpec.model_validate({
        "model": MODEL | changes.get("model", {}),
        "data": changes.get("data", {}),
        "train": TRAIN | changes.get("train", {}),
        "parallel": changes.get("layout", {}),
        "checkpoint": changes.get("checkpoint", {}),
    })  # fmt: skip


def steps(store: dist.Store, rank: int, run: RunSpec, count: int) -> dict[str, Any]:
    """Train `count` steps. (loss, gradient norm) of each, and this stage's parameters after them."""
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, "cpu", 60.0) as axes:
        engine = Engine(run, corpus.vocabulary, axes, torch.device("cpu"))
        outcomes = []
        for step in range(count):
            outcome = engine.step(*corpus.batch(*engine.share(step * run.train.global_batch)))
            outcomes.append((outcome.loss, outcome.grad_norm))
        return {"outcomes": outcomes, "tensors": whole(engine)}


def gradients(store: dist.Store, rank: int, run: RunSpec) -> dict[str, Any]:
    """Raw gradients of the first step, before clipping."""
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, "cpu", 60.0) as axes:
        engine = Engine(run, corpus.vocabulary, axes, torch.device("cpu"))
        loss, norm = engine.gradient(*corpus.batch(*engine.share(0)))
        return {
            "loss": loss,
            "norm": norm,
            "tensors": {name: p.grad.full_tensor().numpy() for name, p in engine.named.items()},
        }


def whole(engine: Engine) -> dict[str, np.ndarray]:
    return {name: tensor.full_tensor().numpy() for name, tensor in engine.state().items()}


def train(store: dist.Store, rank: int, root: str, run: RunSpec, attempt: int, resume: tuple[str, ...]) -> list[Report]:
    """The trainer to its end; what it reported."""
    said: list[Report] = []
    assignment = Assignment(
        job="run",
        attempt=attempt,
        token="test",
        rank=rank,
        run=run,
        root=root,
        store_host="",
        store_port=0,
        resume=resume,
        timeout_s=60.0,
    )
    trainer.train(assignment, store, said.append)
    return said


def non_finite(store: dist.Store, rank: int, root: str, run: RunSpec) -> str:
    """What the trainer raised when its figures were no numbers any more."""
    try:
        train(store, rank, root, run, 1, ())
    except NonFinite as error:
        return str(error)
    raise AssertionError("training ended well")


def merged(results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Tensors of all stages in one dictionary."""
    return {name: value for result in results for name, value in result["tensors"].items()}
