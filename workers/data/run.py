"""One long run of tokens, from which samples are cut: in memory, or in the files of prepared text. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from workers.data import indexed
from workers.data.prepared import Prepared, Shard
from workers.data.staging import Stage


class Run(Protocol):
    tokens: int

    def lengths(self) -> np.ndarray:
        """Tokens of each document, int [documents]."""

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Tokens [starts, length] from each start on, int64."""

    def learned(self, first: int, count: int) -> np.ndarray | bool:
        """Which of `count` tokens are to be learned, bool [count]; True: all."""


class Held:
    """In memory."""

    def __init__(self, documents: Sequence[np.ndarray], learned: Sequence[np.ndarray] | None = None) -> None:
        """`learned`: of each document, which tokens are."""
        self._learned = np.concatenate(learned) if learned else None
        self.ids = np.concatenate(documents) if documents else np.empty(0, np.int32)
        self.tokens, self._lengths = len(self.ids), np.array([len(one) for one in documents])

    def lengths(self) -> np.ndarray:
        return self._lengths

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        return self.ids[starts[:, None] + np.arange(length)].astype(np.int64)

    def learned(self, first: int, count: int) -> np.ndarray | bool:
        return True if self._learned is None else self._learned[first : first + count]


class Mapped:
    """In files, one after the other. Those of an object store are copied to the node where all of them fit there;
    else what a sample needs is read from the store."""

    def __init__(self, uri: str, made: Prepared, stage: Stage) -> None:
        self.uri, self.made, self.stage = uri.rstrip("/"), made, stage
        self.tokens, self.dtype = made.tokens, np.dtype(made.dtype)
        self.shards = [shard for shard in made.shards if shard.tokens]
        self.ends = np.cumsum([shard.tokens for shard in self.shards])
        self.fits = sum(shard.nbytes for shard in self.shards) <= stage.most_bytes
        self.fs, self.root = url_to_fs(self.uri)
        self.remote = not isinstance(self.fs, LocalFileSystem)
        self._open: dict[int, np.ndarray] = {}

    def lengths(self) -> np.ndarray:
        return np.concatenate([self._index(shard).lengths for shard in self.shards])

    def _index(self, shard: Shard) -> indexed.Index:
        name = f"{shard.name}.idx"
        if self.remote and not self.fits:
            return indexed.parse(self.fs.cat_file(f"{self.root}/{name}"))
        nbytes = indexed.HEAD.size + 12 * shard.documents + 8 * (shard.documents + 1)
        return indexed.parse(self.stage.local(f"{self.uri}/{name}", nbytes, shard.idx).read_bytes())

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts, strict=True):
            self._fill(row, int(start))
        return out

    def learned(self, first: int, count: int) -> np.ndarray | bool:
        return True

    def _fill(self, row: np.ndarray, start: int) -> None:
        done = 0
        while done < len(row):
            number = int(np.searchsorted(self.ends, start + done, side="right"))
            first = start + done - (int(self.ends[number - 1]) if number else 0)
            count = min(len(row) - done, self.shards[number].tokens - first)
            row[done : done + count] = self._piece(number, first, count)
            done += count

    def _piece(self, number: int, first: int, count: int) -> np.ndarray:
        shard, size = self.shards[number], self.dtype.itemsize
        if self.remote and not self.fits:
            data = self.fs.cat_file(f"{self.root}/{shard.name}.bin", first * size, (first + count) * size)
            return np.frombuffer(data, self.dtype)
        if number not in self._open:
            path = self.stage.local(f"{self.uri}/{shard.name}.bin", shard.nbytes, shard.bin)
            self._open[number] = np.memmap(path, self.dtype, "r")
        return self._open[number][first : first + count]
