"""Activation recomputation: what the backward pass computes again instead of keeping. Applied to blocks from outside.

`full` keeps a block's input only. `inner` keeps what enters and leaves attention and the feed-forward network, so that
nothing that ranks exchange is exchanged again. `selective` keeps the results of matrix products and attention, and
computes the cheap rest again (arXiv 2205.05198). Gradients are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from workers.models.attention import Attention, LatentAttention
from workers.models.decoder import FeedForward
from workers.models.moe import Experts
from workers.spec import Recompute

INNER = (Attention, LatentAttention, FeedForward)

KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def apply(blocks: Iterable[nn.Module], level: Recompute) -> None:
    """Let each block recompute at this level."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # dropout has no generator
    if level == "none":
        return
    if level == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for module in [part for block in blocks for part in _parts(block, level)]:
        module.forward = partial(checkpoint, module.forward, **options)


def _parts(block: nn.Module, level: Recompute) -> list[nn.Module]:
    """What is computed again as one. Operators can't be told apart where a part of the block is gathered by itself, as
    experts are: `selective` then leaves those out."""
    apart = level == "selective" and any(isinstance(module, Experts) for module in block.modules())
    return [module for module in block.modules() if isinstance(module, INNER)] if level == "inner" or apart else [block]


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
