"""What a checkpoint of very many ranks costs to plan, from metadata alone: no tensor is made and no shard written.

`python tests/bench/checkpoint_plan.py`. Each rank's index is made with the boxes it would keep and the bytes they would
have; only the checksums in it are no checksums. Assembling, publishing and planning are the real ones, in memory. Then
each rank of another layout plans what `logical.load` would read: `read / needed` counts whole checksum blocks, each
once. A rank's seconds are decoding the manifest, the plan, and reading the indexes of the shards that it meets; the
last are measured on some ranks, evenly spaced.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from workers.checkpoint import boxes, manifest, shards
from workers.checkpoint.manifest import Manifest
from workers.checkpoint.shards import ALIGN, ITEM_BYTES, Entry, Index, Region, ShardRecord
from workers.checkpoint.storage import Storage
from workers.parallel.holdings import Holdings
from workers.spec import ParallelLayout, RunSpec

SAVED = "dp=8,pp=16,tp=8"
LOADED = ("dp=4,pp=16,tp=8", "dp=5,pp=12,tp=8", "dp=7,pp=16,tp=8", "dp=10,pp=12,tp=4")
STEP, ATTEMPT, TOKEN = 1000, 1, "bench"


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Of one rank's load."""

    plan_s: float
    reads: int
    shards: tuple[int, ...]
    needed: int  # bytes
    read: int  # bytes, in whole checksum blocks

    @property
    def ratio(self) -> float:
        return self.read / self.needed


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    boxes.TILES = options.tiles
    storage = Storage.open(f"memory://checkpoint-plan-{os.getpid()}")
    try:
        figures = measured(storage, options)
    finally:
        storage.delete("")
    if options.json:
        print(json.dumps(figures))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="end with one line of JSON")
    made.add_argument("--preset", default="gpt3-175b")
    made.add_argument("--layers", type=int, help="instead of the preset's")
    made.add_argument("--saved", default=SAVED, help="the layout that saves; default %(default)s")
    made.add_argument("--loaded", nargs="+", default=LOADED, help="layouts that load")
    made.add_argument("--every", type=int, default=1, help="plan for each rank of so many; default all")
    made.add_argument("--block-bytes", type=int, default=shards.BLOCK, help="that a checksum is of")
    made.add_argument("--tiles", type=int, default=boxes.TILES, help="that a piece is stored in at most")
    return made


def measured(storage: Storage, options: argparse.Namespace) -> dict[str, Any]:
    saver = holdings(options.preset, options.saved, options.layers)
    records = written(storage, saver, options.block_bytes)
    sizes = [storage.size(record.index) for record in records]
    document, assemble_s = timed(assembled, storage, saver, records)
    data, encode_s = timed(manifest.encode, document)
    document, decode_s = timed(manifest.decode, document.path, data)
    figures = {
        "model": options.preset, "layers": saver.run.model.layers, "saved": str(saver.layout),
        "ranks": saver.layout.world,
        "block_bytes": options.block_bytes, "tiles": options.tiles, "checkpoint_bytes": document.nbytes,
        "index_bytes": {"mean": sum(sizes) / len(sizes), "max": max(sizes)},
        "manifest_bytes": len(data), "tensors": len(document.tensors),
        "pieces": sum(len(tensor.pieces) for tensor in document.tensors.values()),
        "assemble_s": assemble_s, "encode_s": encode_s, "decode_s": decode_s, "load": os.getloadavg()[0],
    }  # fmt: skip
    print("  ".join(f"{name} {_told(value)}" for name, value in figures.items()), flush=True)
    del data
    into = [
        _loaded(storage, document, decode_s, holdings(options.preset, layout, options.layers), options)
        for layout in options.loaded
    ]
    return {**figures, "into": into}


def holdings(preset: str, layout: str, layers: int | None = None) -> Holdings:
    """Of a preset's model, or one with so many layers, in a layout given as dp=8,pp=16."""
    sizes = {axis: int(size) for axis, size in (pair.split("=") for pair in layout.split(","))}
    parallel = ParallelLayout.model_validate(sizes)
    train = {"steps": 1, "global_batch": 2 * parallel.dp * parallel.pp}
    model = {"preset": preset} | ({"layers": layers} if layers else {})
    fields = {"model": model, "data": {}, "train": train, "parallel": parallel}
    return Holdings(RunSpec.model_validate(fields), vocabulary=257)


def written(storage: Storage, saver: Holdings, block: int) -> list[ShardRecord]:
    """Each rank's index, as if its shard had been written."""
    folder = manifest.folder(STEP, ATTEMPT, TOKEN)
    records = []
    for rank in range(saver.layout.world):
        entries, nbytes = [], 0
        for region in kept(saver, rank):
            at = -(-nbytes // ALIGN) * ALIGN
            entries.append(Entry(region, at))
            nbytes = at + region.nbytes
        checksums = tuple(f"{number:032x}" for number in range(-(-nbytes // block)))
        data = shards.encode(Index(f"rank-{rank:05d}.bin", nbytes, block, checksums, tuple(entries)))
        path = f"{folder}/rank-{rank:05d}.json"
        storage.create(path, data)
        records.append(ShardRecord(path, shards.digest(data), nbytes))
    return records


def kept(saver: Holdings, rank: int) -> Iterator[Region]:
    """What the rank saves, in the order of its shard."""
    for name, one in sorted(saver.of(rank).items()):
        if one.box.kept and math.prod(one.box.extent):
            for offset, extent in boxes.tiles(one.box, one.slice, ITEM_BYTES[one.dtype]):
                yield Region(name, one.shape, one.dtype, tuple(range(len(one.shape))), offset, extent)


def assembled(storage: Storage, saver: Holdings, records: list[ShardRecord]) -> Manifest:
    return manifest.assemble(
        storage, job="bench", step=STEP, attempt=ATTEMPT, token=TOKEN, layout=saver.layout.model_dump(),
        model=saver.run.model.model_dump(), header={}, records=records, created_at=0.0,
    )  # fmt: skip


def cost(document: Manifest, loader: Holdings, rank: int, block: int) -> Cost:
    """What a rank of another layout would read."""
    wanted = {name: one.wanted for name, one in loader.filled(rank).items()}
    needed = sum(math.prod(one.box.extent) * ITEM_BYTES[one.dtype] for one in wanted.values())
    reads, plan_s = timed(boxes.plan, wanted, document)
    read = 0
    for shard, mine in reads.items():
        for run in boxes.blocks(mine, block):
            read += min(run.stop * block, document.shards[shard].nbytes) - run.start * block
    return Cost(plan_s, sum(map(len, reads.values())), tuple(reads), needed, read)


def _loaded(
    storage: Storage, document: Manifest, decode_s: float, loader: Holdings, options: argparse.Namespace
) -> dict[str, Any]:
    ranks = range(0, loader.layout.world, options.every)
    costs = {rank: cost(document, loader, rank, options.block_bytes) for rank in ranks}
    indexes_s = [_indexes_s(storage, document, costs[rank]) for rank in ranks[:: max(1, len(ranks) // 8)]]
    plans = [one.plan_s for one in costs.values()]
    ratios = [one.ratio for one in costs.values()]
    figures = {
        "layout": str(loader.layout), "ranks": loader.layout.world, "planned": len(costs),
        "plan_s": {"mean": sum(plans) / len(plans), "max": max(plans)}, "indexes_s": max(indexes_s),
        "rank_s": decode_s + max(plans) + max(indexes_s),
        "shards": max(len(one.shards) for one in costs.values()),
        "reads": max(one.reads for one in costs.values()),
        "needed": max(one.needed for one in costs.values()),
        "read_over_needed": {"mean": sum(ratios) / len(ratios), "max": max(ratios)},
        "whole_read_over_needed": sum(one.read for one in costs.values()) / sum(one.needed for one in costs.values()),
    }  # fmt: skip
    print("  ".join(f"{name} {_told(value)}" for name, value in figures.items()), flush=True)
    return figures


def _indexes_s(storage: Storage, document: Manifest, one: Cost) -> float:
    """Seconds to read the indexes of the shards that a rank meets."""
    readers = manifest.readers(storage, document)
    began = time.perf_counter()
    for shard in one.shards:
        _ = readers[shard].index
    return time.perf_counter() - began


def timed(work: Any, *args: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    value = work(*args)
    return value, time.perf_counter() - began


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {_told(one)}" for name, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
