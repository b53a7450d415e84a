"""Where parallelism enters a model: every place that a tensor-parallel group has to touch. Identity on one device.

The model calls these and does not know what is behind them; `workers.parallel.tensor` replaces them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORED = -100
"""A target that is not to be learned."""


class Seams:
    """One device: everything is whole and local."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Before a sub-layer whose weights are split: [batch, seq, hidden] in, the same out."""
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """After a sub-layer whose weights are split: partial sums in, the sum out."""
        return x

    def split(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's part of a weight split by heads, features or vocabulary."""
        return weight

    def kv(self, weight: torch.Tensor) -> torch.Tensor:
        """The rows of a key or value projection that this rank's query heads attend to."""
        return weight

    def whole(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight that every rank has in full."""
        return weight

    def embed(self, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Rows of `weight` [vocabulary, hidden] for `tokens` [batch, seq]."""
        return F.embedding(tokens, weight)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy in nats, summed over tokens whose target is not IGNORED.

        logits [batch, seq, vocabulary], targets [batch, seq].
        """
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
