"""Samples of one source or of a weighted mixture, in one global order that no layout changes. Torch-free.

A sample is a row of `seq_len` tokens, with the token after each as its target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from workers.data import chat, order, prepared, text, tokens
from workers.data.chat import Template
from workers.data.mixture import Mixture
from workers.data.packing import Packing
from workers.data.run import Held, Mapped, Run
from workers.data.staging import Stage
from workers.data.text import DataError
from workers.spec import BUILT_IN_TEXT, DataSpec, SourceSpec

Rows = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Inputs and targets [samples, seq_len] and, of packed samples, where the document of each position begins in them."""


class Source:
    """Samples of one source under one seed."""

    def __init__(self, source: SourceSpec, data: DataSpec, seq_len: int, seed: int) -> None:
        self.seq_len, self.seed = seq_len, seed
        self.run, self.tokenizer, self.vocabulary = _opened(source, data)
        self.packing = Packing(self.run.lengths(), seq_len) if data.packing == "documents" else None
        self.size = (self.run.tokens - 1) // seq_len if self.packing is None else self.packing.size
        if self.size < 1:
            raise DataError(
                f"{source.source} has {self.run.tokens} tokens; one sample needs {seq_len + 1}: "
                "use a smaller model.seq_len or more text"
            )

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Which samples of the source come at these places of its order."""
        return order.at(self.seed, positions.astype(np.uint64), self.size)

    def rows(self, positions: np.ndarray) -> Rows:
        ids = self.ids(positions)
        if self.packing is not None:
            return self.packing.rows(self.run, ids)
        rows = self.run.rows(ids * self.seq_len, self.seq_len + 1)
        return rows[:, :-1], rows[:, 1:], None


class Reading:
    """All samples of a job, by their numbers."""

    def __init__(self, data: DataSpec, seq_len: int, seed: int) -> None:
        self.named = data.sources or (SourceSpec(source=data.source, text_field=data.text_field),)
        seeds = [seed if data.sources is None else _seed(seed, one.source) for one in self.named]
        self.sources = [Source(one, data, seq_len, own) for one, own in zip(self.named, seeds, strict=True)]
        self.seq_len, self.seed = seq_len, seed
        self.vocabulary = self.sources[0].vocabulary
        for one, source in zip(self.named, self.sources, strict=True):
            if source.vocabulary != self.vocabulary:
                raise DataError(
                    f"{one.source} has {source.vocabulary} ids and {self.named[0].source} {self.vocabulary}: prepare "
                    "all sources with one tokenizer"
                )
        self.size = sum(source.size for source in self.sources)
        self.mixture = Mixture([one.weight for one in self.named], seed)
        self.packed = data.packing == "documents"

    def rows(self, cursor: int, count: int) -> Rows:
        """Of the samples number `cursor` and on."""
        if len(self.sources) == 1:
            return self.sources[0].rows(np.arange(cursor, cursor + count))
        inputs, targets, starts = (np.empty((count, self.seq_len), dtype=np.int64) for _ in range(3))
        which, positions = self.mixture.take(cursor, count)
        for number, source in enumerate(self.sources):
            own = which == number
            inputs[own], targets[own], begins = source.rows(positions[own])
            if begins is not None:
                starts[own] = begins
        return inputs, targets, starts if self.packed else None

    def origins(self, cursor: int, count: int) -> list[tuple[str, int]]:
        """(source, number of the sample in it) of the samples number `cursor` and on; an epoch has each number once."""
        if len(self.sources) == 1:
            which, positions = np.zeros(count, np.int64), np.arange(cursor, cursor + count)
        else:
            which, positions = self.mixture.take(cursor, count)
        return [
            (self.named[one].source, int(self.sources[one].ids(np.array([position]))[0]))
            for one, position in zip(which, positions, strict=True)
        ]


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


def _opened(source: SourceSpec, data: DataSpec) -> tuple[Run, str, int]:
    """The run of tokens, whose they are, and how many kinds of them there are."""
    tokenizer = data.tokenizer
    if data.format == "chat":
        using = tokens.tokenizer(tokenizer)
        talks = chat.encoded(source.source, source.text_field, Template.of(data.template, tokenizer), using)
        return Held([ids for ids, _ in talks], [learned for _, learned in talks]), tokenizer, using.size
    if source.source != BUILT_IN_TEXT and prepared.found(source.source):
        made = prepared.read(source.source)
        if tokenizer not in ("byte", made.tokenizer.name):
            raise DataError(
                f"{source.source} was prepared with tokenizer {made.tokenizer.name}, not {tokenizer}: name that one"
            )
        return Mapped(source.source, made, Stage.of_node()), made.tokenizer.name, made.tokenizer.size
    using = tokens.tokenizer(tokenizer)
    return Held([using.encode(document) for document in _documents(source)]), tokenizer, using.size


def _seed(seed: int, source: str) -> int:
    """Of one source in a mixture: its order has nothing to do with the others'."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{source}".encode()).digest()[:8], "little") >> 1
