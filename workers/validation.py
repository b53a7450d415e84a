"""How good the model is on text that is not trained on: source by source, and what follows for the run.

Every rank judges alike, since all of them see the same losses. Knows neither the loop's saves nor who hears of them.
"""

from __future__ import annotations

import time

import torch

from workers.cursor import Cursor
from workers.data.corpus import Corpus
from workers.engine import Engine
from workers.models.seams import IGNORED
from workers.reports import Evaluated
from workers.spec import EvalSpec, RunSpec


class Validation:
    """Of a run that asks for it. A source is cut and ordered as what is trained on."""

    def __init__(self, run: RunSpec, spec: EvalSpec) -> None:
        self.run, self.spec = run, spec
        self.corpora = {one.label: self._corpus(one.source, one.text_field) for one in spec.data}

    def evaluate(self, engine: Engine, cursor: Cursor) -> tuple[Evaluated, bool]:
        """What is told of an evaluation now, and whether it is the best so far. All ranks call it."""
        found = {name: self.measure(engine, corpus) for name, corpus in self.corpora.items()}
        tokens = sum(count for _, count in found.values())
        whole = sum(loss * count for loss, count in found.values()) / max(1, tokens)
        best = cursor.judge(found[self.spec.metric][0] if self.spec.metric in found else whole, self.spec.min_delta)
        sources = tuple((name, loss, count) for name, (loss, count) in found.items())
        return Evaluated(cursor.step, time.time(), whole, tokens, sources, cursor.best, cursor.worse), best

    def measure(self, engine: Engine, corpus: Corpus) -> tuple[float, int]:
        """(mean loss, tokens) of the first `batches` global batches, or of every sample once where that is less."""
        batch, losses, tokens = self.run.train.global_batch, 0.0, 0
        for number in range(min(self.spec.batches, -(-corpus.size // batch))):
            first, count = engine.share(number * batch)
            inputs, targets = corpus.batch(first, count)
            again = torch.arange(first, first + count) >= corpus.size
            targets = torch.where(again[:, None], IGNORED, targets)
            loss, learned = engine.evaluate(inputs, targets, corpus.starts(first, count))
            losses, tokens = losses + loss * learned, tokens + learned
        return losses / max(1, tokens), tokens

    def _corpus(self, source: str, text_field: str) -> Corpus:
        data = self.run.data.model_copy(update={"source": source, "sources": None, "text_field": text_field})
        return Corpus(data, self.run.model.seq_len, self.run.train.seed)
