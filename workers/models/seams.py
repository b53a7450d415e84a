"""Where parallelism enters a model: every place that a group of ranks has to touch. Identity on one device.

The model calls these and does not know what is behind them; `workers.parallel.tensor` and `.expert` replace them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from workers.spec import IGNORED as IGNORED

NOBODY = -1
"""The number of a sample that is only there to fill a micro-batch."""


def widened(x: torch.Tensor) -> torch.Tensor:
    """In at least float32: where half precision loses too much."""
    return x if x.dtype == torch.float64 else x.float()


class Seams:
    """One device: everything is whole and local."""

    seed = 0
    """Of dropout."""

    scale = 1.0
    """What the sum of the losses is multiplied by before the backward pass."""

    sharers = 1
    """Ranks that have the positions of a sample between them."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Before a sub-layer whose weights are split: [batch, seq, hidden] in, the same out."""
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """After a sub-layer whose weights are split: partial sums in, the sum out."""
        return x

    def kv(self, weight: torch.Tensor) -> torch.Tensor:
        """The rows of a key or value projection that this rank's query heads attend to."""
        return weight

    def first_position(self, count: int) -> int:
        """The first position of a sample of which this rank has `count` outside of sub-layers."""
        return 0

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that have other positions of the same samples."""
        return x

    def embed(self, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Rows of `weight` [vocabulary, hidden] for `tokens` [batch, seq]."""
        return F.embedding(tokens, weight)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy in nats, summed over tokens whose target is not IGNORED.

        logits [batch, seq, vocabulary], targets [batch, seq].
        """
        wide = widened(logits.flatten(0, 1))
        return F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORED, reduction="sum")


Work = Callable[[torch.Tensor, list[int]], torch.Tensor]
"""Rows sorted by expert and how many each expert here has -> as many rows."""


class Exchange:
    """One device: all experts are here."""

    def run(self, rows: torch.Tensor, counts: torch.Tensor, work: Work) -> torch.Tensor:
        """`work` of each row's expert. rows [any, hidden] sorted by expert, counts [experts] -> the same shape."""
        return work(rows, counts.tolist())
