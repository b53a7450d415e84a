"""What a rank trains on: the samples of `reading`, as tensors."""

from __future__ import annotations

import torch

from workers.data.reading import Reading, Rows, documents
from workers.data.text import DataError
from workers.spec import DataSpec

__all__ = ["Corpus", "DataError", "documents"]


class Corpus:
    def __init__(self, data: DataSpec, seq_len: int, seed: int) -> None:
        self.reading = Reading(data, seq_len, seed)
        self.vocabulary, self.size, self.seed = self.reading.vocabulary, self.reading.size, seed
        self._last: tuple[tuple[int, int], Rows] | None = None

    def batch(self, cursor: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 [count, seq_len], of the samples number `cursor` and on in the global order."""
        inputs, targets, _ = self._rows(cursor, count)
        return torch.from_numpy(inputs).contiguous(), torch.from_numpy(targets).contiguous()

    def starts(self, cursor: int, count: int) -> torch.Tensor | None:
        """Where in its sample the document of each position begins, int64 [count, seq_len]; None: samples are cut from
        one run."""
        starts = self._rows(cursor, count)[2] if self.reading.packed else None
        return None if starts is None else torch.from_numpy(starts)

    def _rows(self, cursor: int, count: int) -> Rows:
        """Kept until others are asked for."""
        if self._last is None or self._last[0] != (cursor, count):
            self._last = (cursor, count), self.reading.rows(cursor, count)
        return self._last[1]
