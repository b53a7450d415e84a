"""Warms a process that stands behind a rank: whole steps of its share of the model with nobody else there.

What is slow the first time (imports, caches of dispatch and of sharding, kernels) is then done before it is needed. It
counts for the thread that does it, and for the same rank of the same run. No device is touched, and nothing is kept.
"""

from __future__ import annotations

import gc

import torch

from workers.data.corpus import Corpus
from workers.engine import Engine
from workers.parallel import mesh
from workers.spec import RunSpec

STEPS = 2
LARGEST = 200_000_000
"""Parameters of a rank that are worth building for it on a host."""


def warm(run: RunSpec, rank: int) -> bool:
    """Whether it could be done: not for shares of a model too large for a host, nor where ranks exchange tokens."""
    layout = run.parallel
    if run.model.experts is not None or run.train.compile or _parameters(run) > LARGEST * layout.pp * layout.tp:
        return False
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.pretended(rank, layout) as axes:
        engine = Engine(run, corpus.vocabulary, axes, torch.device("cpu"))
        share = engine.share(0)
        tokens, starts = corpus.batch(*share), corpus.starts(*share)
        for _ in range(STEPS):
            engine.gradient(*tokens, starts=starts)
            engine.optimizer.step()
        engine.state()
    gc.collect()
    return True


def _parameters(run: RunSpec) -> int:
    model = run.model
    return 12 * model.layers * model.hidden**2 + 2 * (model.vocab_size or 0) * model.hidden
