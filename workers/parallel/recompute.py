"""Activation recomputation: what the backward pass computes again instead of keeping. Applied to blocks from outside.

`full` keeps a block's input only; `selective` keeps the results of matrix products and attention too, and computes the
cheap rest again (arXiv 2205.05198). Gradients are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from workers.spec import Recompute

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
    if level == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if level == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, **options)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
