"""The same state saved and loaded by this project and by torch.distributed.checkpoint (DCP), in turn. Run in a pool.

What is timed is timed from barrier to barrier. A save ends when the checkpoint is published, its files synced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from workers.checkpoint import logical, manifest
from workers.checkpoint.publisher import Publisher
from workers.checkpoint.saver import Saver
from workers.checkpoint.storage import Storage
from workers.parallel import mesh
from workers.reports import Report, ShardSaved
from workers.spec import Assignment, RunSpec

OURS = "ours"
ROW_PARALLEL = "down"  # cut by tp along dimension 1; the others along dimension 0. dp cuts dimension 0 of what is left
PLAIN = StagingOptions(False, False, False, False)
BEHIND = StagingOptions(False, False, use_async_staging=True, use_non_blocking_copy=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """AdamW's state of some square matrices, in fp32: `layers` times a column- and a row-parallel one."""

    layers: int
    side: int

    def names(self) -> list[str]:
        kinds = [f"layers.{layer}.ffn.{kind}" for layer in range(self.layers) for kind in ("up", ROW_PARALLEL)]
        return [f"{part}.{kind}" for part in ("model", "exp_avg", "exp_avg_sq") for kind in kinds]

    @property
    def nbytes(self) -> int:
        return len(self.names()) * self.side**2 * 4

    def slices(self) -> dict[str, int]:
        return {name: 1 if name.endswith(ROW_PARALLEL) else 0 for name in self.names()}


@contextlib.contextmanager
def joined(store: dist.Store, rank: int, dp: int, tp: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=dp * tp, timeout=datetime.timedelta(seconds=300))
    try:
        yield init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()
        mesh.forget_groups()


def state_of(sizes: Sizes, axes: DeviceMesh) -> dict[str, DTensor]:
    """Every element's value tells which one it is."""
    return {name: _tensor(number, name, sizes.side, axes) for number, name in enumerate(sizes.names())}


def _tensor(number: int, name: str, side: int, axes: DeviceMesh) -> DTensor:
    dp, tp = axes.size(0), axes.size(1)
    my_dp, my_tp = axes.get_coordinate() or ()
    rows, columns = side // dp, side
    top = my_dp * rows
    left = 0
    if name.endswith(ROW_PARALLEL):
        columns //= tp
        left, placements = my_tp * columns, [Shard(0), Shard(1)]
    else:
        rows //= tp
        top = my_tp * (side // tp) + my_dp * rows
        placements = [_StridedShard(0, split_factor=tp) if tp > 1 else Shard(0), Shard(0)]
    local = torch.arange(top, top + rows, dtype=torch.float32).mul_(side).unsqueeze(1)
    local = local + torch.arange(left, left + columns, dtype=torch.float32) + number
    return DTensor.from_local(
        local, axes, placements, run_check=False, shape=torch.Size((side, side)), stride=(side, 1)
    )


class Ours:
    def __init__(self, folder: str, rank: int, axes: DeviceMesh, sizes: Sizes) -> None:
        dp, tp = axes.size(0), axes.size(1)
        self.storage, self.rank, self.sizes = Storage.open(folder).child("job"), rank, sizes
        run = RunSpec.model_validate({
            "model": {"layers": 1, "hidden": 8, "heads": 4, "seq_len": 8, "vocab_size": 16},
            "data": {}, "train": {"steps": 1, "global_batch": dp}, "parallel": {"dp": dp, "tp": tp},
        })  # fmt: skip
        self.said: list[Report] = []
        assignment = Assignment("job", 1, "bench", rank, run, folder, "", 0)
        self.saver = Saver(self.storage, assignment, self.said.append)
        self.publisher = Publisher(self.storage, "job", 1, "bench", run)

    def save(self, step: int, state: dict[str, DTensor]) -> float:
        """Until it is published. Seconds until the caller may change the state."""
        began = time.perf_counter()
        self.saver.save(step, state, self.sizes.slices(), {"samples": step})
        stall = time.perf_counter() - began
        self.saver.wait()
        everyone: list[Any] = [None] * dist.get_world_size() if self.rank == 0 else []
        dist.gather_object(self.said.pop(), everyone or None)
        if self.rank == 0:
            if strangers := [said for said in everyone if not isinstance(said, ShardSaved)]:
                raise RuntimeError(f"not saved: {strangers[0]}")
            self.publisher.publish(step, everyone)
        return stall

    def load(self, step: int, state: dict[str, DTensor]) -> None:
        logical.load(state, manifest.load(self.storage, manifest.path(step, 1)), self.storage)

    def remove(self, step: int) -> None:
        self.storage.delete(manifest.path(step, 1))
        self.storage.delete(manifest.folder(step, 1, "bench"))


@dataclasses.dataclass(frozen=True, slots=True)
class Theirs:
    """DCP with one set of its options; `stager` makes a save asynchronous."""

    folder: str
    writer: Callable[..., Any] = dcp.FileSystemWriter
    reader: Callable[..., Any] = dcp.FileSystemReader
    threads: int = 1
    asynchronous: bool = False
    stager: DefaultStager | None = None

    def save(self, step: int, state: dict[str, DTensor]) -> float:
        began = time.perf_counter()
        writer = self.writer(self._path(step), thread_count=self.threads)
        if not self.asynchronous:
            dcp.save(state, storage_writer=writer)
            return time.perf_counter() - began
        response = dcp.async_save(state, storage_writer=writer, async_stager=self.stager)
        if isinstance(response, dcp.state_dict_saver.AsyncSaveResponse):
            response.staging_completion.result()  # the state may not be changed before
            response = response.upload_completion
        stall = time.perf_counter() - began
        response.result()
        return stall

    def load(self, step: int, state: dict[str, DTensor]) -> None:
        dcp.load(state, storage_reader=self.reader(self._path(step)))

    def remove(self, step: int) -> None:
        shutil.rmtree(self._path(step))

    def _path(self, step: int) -> str:
        return str(Path(self.folder, f"dcp-{step}"))


Side = Ours | Theirs


def saves(store: dist.Store, rank: int, folder: str, sizes: Sizes, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each side's saves, and of the stalls in them, after one that warms up. One of each side stays."""
    warnings.simplefilter("ignore")
    with joined(store, rank, 2, 2) as axes:
        state = state_of(sizes, axes)
        kept, behind = DefaultStager(PLAIN), DefaultStager(BEHIND)
        ours = Ours(folder, rank, axes, sizes)
        sides: dict[str, Side] = {
            OURS: ours,
            "file, 1 thread": Theirs(folder),
            "file, 2 threads": Theirs(folder, threads=2),
            "fsspec, 1 thread": Theirs(folder, FsspecWriter),
            "fsspec, 2 threads": Theirs(folder, FsspecWriter, threads=2),
            "async": Theirs(folder, asynchronous=True),
            "async, memory kept": Theirs(folder, asynchronous=True, stager=kept),
            "async, staged behind": Theirs(folder, asynchronous=True, stager=behind),
        }
        found: dict[str, dict[str, list[float]]] = {name: {"save_s": [], "stall_s": []} for name in sides}
        step = 1
        for number in range(-1, rounds):
            for name in rotated(list(sides), number):
                step += 1
                settle(rank)
                began = time.perf_counter()
                stall = slowest(sides[name].save(step, state))
                if number >= 0:
                    found[name]["save_s"].append(time.perf_counter() - began)
                    found[name]["stall_s"].append(stall)
                if rank == 0:
                    sides[name].remove(step)
        settle(rank)
        for side in (ours, sides["file, 1 thread"]):
            side.save(1, state)
        for one in (ours.saver, kept, behind):
            one.close()
        return found


def loads(
    store: dist.Store, rank: int, folder: str, sizes: Sizes, dp: int, tp: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Seconds of each side's loads into a mesh of this shape, after one that is checked; and bytes read and needed."""
    warnings.simplefilter("ignore")
    with joined(store, rank, dp, tp) as axes:
        wanted, state = state_of(sizes, axes), state_of(sizes, axes)
        sides: dict[str, Side] = {
            OURS: Ours(folder, rank, axes, sizes),
            "file": Theirs(folder),
            "fsspec": Theirs(folder, reader=FsspecReader),
        }
        needed = sum(tensor.to_local().nbytes for tensor in state.values())
        found: dict[str, dict[str, Any]] = {name: {"load_s": [], "read": 0, "needed": needed} for name in sides}
        for number in range(-1, rounds):
            for name in rotated(list(sides), number):
                for tensor in state.values():
                    tensor.to_local().fill_(-1)
                before = bytes_read()
                dist.barrier()
                began = time.perf_counter()
                sides[name].load(1, state)
                dist.barrier()
                if number >= 0:
                    found[name]["load_s"].append(time.perf_counter() - began)
                    found[name]["read"] = bytes_read() - before
                elif wrong := [name for name in state if not state[name].to_local().equal(wanted[name].to_local())]:
                    raise AssertionError(f"{name} loaded other values of {wrong}")
        return found


def growth(store: dist.Store, rank: int, folder: str, count: int, since: int) -> float:
    """MB by which this process's memory grew at its peak after save `since` of `count` small ones."""
    sizes, process, rss = Sizes(2, 128), psutil.Process(), []
    with joined(store, rank, 2, 1) as axes:
        ours, state = Ours(folder, rank, axes, sizes), state_of(sizes, axes)
        for step in range(1, count + 1):
            ours.save(step, state)
            if rank == 0:
                ours.publisher.retain()
            rss.append(process.memory_info().rss)
        ours.saver.close()
    return (max(rss[since:]) - rss[since - 1]) / 1e6


def rotated(names: list[str], number: int) -> list[str]:
    at = number % len(names)
    return names[at:] + names[:at]


def settle(rank: int) -> None:
    """Nothing is left to be written."""
    dist.barrier()
    if rank == 0:
        os.sync()
    dist.barrier()


def slowest(seconds: float) -> float:
    """Of all ranks."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def bytes_read() -> int:
    """By this process, from files in memory as well."""
    return int(psutil.Process().io_counters().read_chars)
