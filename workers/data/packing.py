"""Whole documents put side by side into samples, in their order; one that is too long for a sample is cut into pieces.

Each piece is read alone: attention does not leave it, and its positions begin at 0. What is left of a sample is filled
with targets that are not learned. A piece of n + 1 tokens has n positions: each has the token after it as its target.
"""

from __future__ import annotations

import numpy as np

from workers.data.run import Run
from workers.spec import IGNORED


class Packing:
    """Of documents with these lengths, int [documents], one after the other in a run of tokens."""

    def __init__(self, lengths: np.ndarray, seq_len: int) -> None:
        self.seq_len = seq_len
        positions = np.maximum(lengths.astype(np.int64) - 1, 0)
        begins = np.cumsum(lengths, dtype=np.int64) - lengths
        pieces = -(-positions // seq_len)
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a piece in its document
        self.begins = np.repeat(begins, pieces) + number * seq_len
        self.sizes = np.minimum(np.repeat(positions, pieces) - number * seq_len, seq_len)
        self.samples = _samples(self.sizes, seq_len)

    @property
    def size(self) -> int:
        """Samples."""
        return len(self.samples) - 1

    @property
    def filled(self) -> float:
        """The part of all positions that has a target."""
        return float(self.sizes.sum() / max(1, self.size * self.seq_len))

    def rows(self, run: Run, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, targets, and where in the sample the document of each position begins; int64 [ids, seq_len]."""
        shape = (len(ids), self.seq_len)
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        starts = np.tile(np.arange(self.seq_len), (len(ids), 1))  # what fills is alone
        for row, sample in enumerate(ids):
            at = 0
            for piece in range(self.samples[sample], self.samples[sample + 1]):
                end = at + int(self.sizes[piece])
                text = run.rows(self.begins[piece : piece + 1], end - at + 1)[0]
                learned = run.learned(int(self.begins[piece]) + 1, end - at)
                inputs[row, at:end], starts[row, at:end] = text[:-1], at
                targets[row, at:end] = np.where(learned, text[1:], IGNORED)
                at = end
        return inputs, targets, starts


def _samples(sizes: np.ndarray, seq_len: int) -> np.ndarray:
    """The first piece of each sample, and the number of pieces: as many go into one as follow each other and fit."""
    ends = np.concatenate(([0], np.cumsum(sizes)))
    after = np.searchsorted(ends, ends + seq_len, side="right") - 1
    found, at = [0], 0
    while at < len(sizes):
        at = int(after[at])
        found.append(at)
    return np.array(found, np.int64)
