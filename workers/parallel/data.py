"""Data parallelism through `fully_shard` (FSDP2): ZeRO (arXiv 1910.02054) and hybrid sharding, by one option.

zero 1: parameters stay gathered after the forward pass and gradients are reduced once a step; 2: gradients are reduced
and sharded each micro-batch; 3: parameters are resharded after use, block by block. Gradients are sums: dividing by the
token count is the loss's business, so that replicas may run different numbers of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from workers.models.samples import Samples


def apply(
    model: nn.Module,
    parts: Iterable[tuple[nn.Module, DeviceMesh]],
    mesh: DeviceMesh,
    zero: int,
    compute: torch.dtype,
    reduce: torch.dtype,
) -> None:
    """Shard every parameter of `model` over `mesh`: (shard) or (replicate, shard). Compute and reduce in the dtypes.

    `parts`, inner ones first, are gathered on their own, each over its own mesh. Where there is neither another rank to
    share with nor another dtype to compute in, everything is left as it is.
    """
    parts = list(parts)
    alone = all(shards.size() == 1 for shards in (mesh, *(own for _, own in parts)))
    if alone and {compute, reduce} == {parameter.dtype for parameter in model.parameters()}:
        return
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    for part, shards in (*parts, (model, mesh)):
        fully_shard(part, mesh=shards, mp_policy=policy, reshard_after_forward=zero == 3)
    for module in sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def over(mesh: DeviceMesh, shard: str) -> DeviceMesh:
    """The axes of `mesh` that hold copies and shards: with `replicate` where there are copies."""
    return mesh["replicate", shard] if mesh["replicate"].size() > 1 else mesh[shard]


def sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def before_backward(model: nn.Module, last: bool, zero: int) -> None:
    """Set up the next backward pass, the step's last or not. At zero 1 only the last one communicates: replicas may
    then run different numbers of micro-batches."""
    for module in sharded(model):
        module.set_requires_gradient_sync(last or zero > 1, recurse=False)
        module.set_reshard_after_backward(last or zero == 3, recurse=False)
        module.set_is_last_backward(last)


class EveryBackward(nn.Module):
    """Hides that `part` is sharded from a pipeline schedule, which would else reduce once a step."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor, samples: Samples) -> torch.Tensor:
        return self.part(x, samples)


def free(model: nn.Module) -> None:
    """Let go of what a forward pass without a backward one has gathered: it would hide later updates."""
    for module in sharded(model):
        module.reshard()
