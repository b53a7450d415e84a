"""What blocks are told of the samples of a micro-batch, beside their activations."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Samples(NamedTuple):
    numbers: torch.Tensor  # int64 [batch], in the global order
    starts: torch.Tensor | None = None  # int64 [batch, seq]: where the document of each position begins in its sample
    """None: a sample is one document."""

    def positions(self) -> torch.Tensor | None:
        """Of each position in its document, [batch, seq]; None: as in the sample."""
        if self.starts is None:
            return None
        return torch.arange(self.starts.shape[1], device=self.starts.device) - self.starts

    def mask(self) -> torch.Tensor | None:
        """Which key a query may look at, bool [batch, 1, queries, keys]: those of its document that are not later."""
        if self.starts is None:
            return None
        seq = self.starts.shape[1]
        earlier = torch.ones(seq, seq, dtype=torch.bool, device=self.starts.device).tril()
        return (earlier & (self.starts[:, :, None] == self.starts[:, None, :]))[:, None]
