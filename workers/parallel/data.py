"""Data parallelism through `fully_shard` (FSDP2): parameters, gradients and optimizer state sharded over the dp axis.

Parameters stay gathered after the forward pass and gradients are reduced once a step: the traffic of ZeRO-1
(arXiv 1910.02054). Gradients are sums: dividing by the token count is the loss's business.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def apply(model: nn.Module, mesh: DeviceMesh, compute: torch.dtype, reduce: torch.dtype) -> None:
    """Shard every parameter of `model` over the one-dimensional dp `mesh`; compute and reduce in the given dtypes."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reduce_on_backward(model: nn.Module, reduce: bool) -> None:
    """Whether the next backward pass is the step's last one and so reduces the gradients."""
    for module in sharded(model):
        module.set_requires_gradient_sync(reduce, recurse=False)
        module.set_is_last_backward(reduce)
