"""Process groups: joining a world, and its mesh of axes pp, dp (replicate x shard), tp. Knows no model."""

from __future__ import annotations

import contextlib
import datetime
import gc
import resource
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workers.spec import ParallelLayout

AXES = ("pp", "replicate", "shard", "tp")
"""dp is replicate x shard: the same ranks in the same order."""

EXPERT_AXES = ("pp", "replicate", "edp", "ep")


@contextlib.contextmanager
def joined(store: dist.Store, rank: int, layout: ParallelLayout, device: str, timeout_s: float) -> Iterator[DeviceMesh]:
    """This process as `rank` of a world of `layout.world`; the mesh lives until the block ends.

    Raises torch's DistError when the others don't come within the timeout.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    backend = "nccl" if device == "gpu" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=layout.world, timeout=timeout)
    try:
        yield _mesh(_shape(layout), AXES, device)
    finally:
        dist.destroy_process_group()
        forget_groups()


@contextlib.contextmanager
def pretended(rank: int, layout: ParallelLayout) -> Iterator[DeviceMesh]:
    """As `joined` on CPUs, without the others: collectives return at once, and what they would receive is anything.

    Torch's caches are kept: groups have the names that they will have when this process is `rank` of that layout.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        yield _mesh(_shape(layout), AXES, "cpu", "fake")
    finally:
        dist.destroy_process_group()


def of_experts(layout: ParallelLayout, device: torch.device) -> DeviceMesh:
    """The world again as pp, replicate, edp, ep: a group of `ep` consecutive ranks has all experts between them."""
    apart = layout.dp * layout.tp // layout.replicate // layout.ep
    shape = (layout.pp, layout.replicate, apart, layout.ep)
    return _mesh(shape, EXPERT_AXES, "gpu" if device.type == "cuda" else "cpu")


def _shape(layout: ParallelLayout) -> tuple[int, ...]:
    return layout.pp, layout.replicate, layout.dp // layout.replicate, layout.tp


def _mesh(shape: tuple[int, ...], names: tuple[str, ...], device: str, backend: str = "") -> DeviceMesh:
    """Each axis has groups of its own, with the world's timeout."""
    own: Any = dict.fromkeys(names, backend or ("nccl" if device == "gpu" else "gloo"))
    kind = "cuda" if device == "gpu" else "cpu"
    mesh = init_device_mesh(kind, shape, mesh_dim_names=names, backend_override=own)
    for group in mesh.get_all_groups() if backend != "fake" else ():
        hurry(group)
    return mesh


def hurry(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Give a group the world's timeout: torch makes new ones that wait half an hour for a dead peer."""
    world = dist.distributed_c10d._get_default_group()
    backend = world._get_backend(world._device_types[0])
    dist.distributed_c10d._set_pg_timeout(backend.options._timeout, group)
    return group


def forget_groups() -> None:
    """Drop torch's caches that hold names of destroyed groups, so that this process can join again."""
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    gc.collect()


def device_of(device: str, local_index: int) -> torch.device:
    """The device a rank computes on; a GPU becomes the process's current one, which NCCL and the mesh go by."""
    if device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local_index)
    return torch.device("cuda", local_index)


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process had: on its GPU, or in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def name_of(device: torch.device) -> str:
    """What the maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
