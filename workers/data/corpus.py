"""What a job trains on: samples of one source or of a weighted mixture, in one global order that no layout changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch

from workers.data import order, prepared, text, tokens
from workers.data.mixture import Mixture
from workers.data.run import Held, Mapped, Run
from workers.data.staging import Stage
from workers.data.text import DataError
from workers.spec import BUILT_IN_TEXT, DataSpec, SourceSpec

__all__ = ["Corpus", "DataError", "documents"]


class Source:
    """Samples of `seq_len` tokens and the token after each, cut from one run of tokens."""

    def __init__(self, source: SourceSpec, tokenizer: str, seq_len: int, seed: int) -> None:
        self.seq_len, self.seed = seq_len, seed
        self.run, self.vocabulary = _opened(source, tokenizer)
        self.size = (self.run.tokens - 1) // seq_len
        if self.size < 1:
            raise DataError(
                f"{source.source} has {self.run.tokens} tokens; one sample needs {seq_len + 1}: "
                "use a smaller model.seq_len or more text"
            )

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Tokens [positions, seq_len + 1] of the samples with these numbers in this source's order."""
        ids = order.at(self.seed, positions.astype(np.uint64), self.size)
        return self.run.rows(ids * self.seq_len, self.seq_len + 1)


class Corpus:
    def __init__(self, data: DataSpec, seq_len: int, seed: int) -> None:
        named = data.sources or (SourceSpec(source=data.source, text_field=data.text_field),)
        seeds = [seed if data.sources is None else _seed(seed, one.source) for one in named]
        self.sources = [Source(one, data.tokenizer, seq_len, own) for one, own in zip(named, seeds, strict=True)]
        self.vocabulary = self.sources[0].vocabulary
        for one, source in zip(named, self.sources, strict=True):
            if source.vocabulary != self.vocabulary:
                raise DataError(
                    f"{one.source} has {source.vocabulary} ids and {named[0].source} {self.vocabulary}: prepare all "
                    "sources with one tokenizer"
                )
        self.size = sum(source.size for source in self.sources)
        self.mixture = Mixture([one.weight for one in named], seed)

    def batch(self, cursor: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 [count, seq_len], of the samples number `cursor` and on in the global order."""
        rows = torch.from_numpy(self._rows(cursor, count))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _rows(self, cursor: int, count: int) -> np.ndarray:
        if len(self.sources) == 1:
            return self.sources[0].rows(np.arange(cursor, cursor + count))
        rows = np.empty((count, self.sources[0].seq_len + 1), dtype=np.int64)
        which, positions = self.mixture.take(cursor, count)
        for number, source in enumerate(self.sources):
            own = which == number
            rows[own] = source.rows(positions[own])
        return rows


def documents(data: DataSpec) -> Iterator[str]:
    """Documents of a source in a fixed order. Raises DataError where there is nothing to read."""
    yield from _documents(SourceSpec(source=data.source, text_field=data.text_field))


def _documents(source: SourceSpec) -> Iterator[str]:
    if source.source == BUILT_IN_TEXT:
        from pydoc_data.topics import topics

        yield from (topics[name] for name in sorted(topics))
        return
    for uri in text.files(source.source):
        yield from text.documents(uri, source.text_field)


def _opened(source: SourceSpec, tokenizer: str) -> tuple[Run, int]:
    """The run of tokens and the size of their vocabulary."""
    if source.source != BUILT_IN_TEXT and prepared.found(source.source):
        made = prepared.read(source.source)
        if tokenizer not in ("byte", made.tokenizer.name):
            raise DataError(
                f"{source.source} was prepared with tokenizer {made.tokenizer.name}, not {tokenizer}: name that one"
            )
        return Mapped(source.source, made, Stage.of_node()), made.tokenizer.size
    using = tokens.tokenizer(tokenizer)
    return Held(tokens.encode(_documents(source), using)), using.size


def _seed(seed: int, source: str) -> int:
    """Of one source in a mixture: its order has nothing to do with the others'."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{source}".encode()).digest()[:8], "little") >> 1
