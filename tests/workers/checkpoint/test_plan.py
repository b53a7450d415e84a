"""What a checkpoint of many ranks costs to plan, in a small form of the bench; and a load reads what was planned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.bench import checkpoint_plan as bench
from tests.workers.checkpoint import test_logical as ranks
from workers import flops
from workers.checkpoint import boxes, logical, manifest, shards
from workers.checkpoint.boxes import Box, Wanted
from workers.checkpoint.storage import LocalStorage, Storage
from workers.parallel.holdings import Holdings

pytestmark = pytest.mark.torch

BLOCK = 256 << 10
SAVED, LOADED = "dp=4,pp=2,tp=8", "dp=3,pp=2,tp=8"


def holdings(layout: str) -> Holdings:
    """Pieces are as large as those of a real run, but there are few layers."""
    return bench.holdings("llama3-70b", layout, layers=8)


@pytest.fixture
def memory() -> Iterator[Storage]:
    storage = Storage.open("memory://test-plan")
    yield storage
    storage.delete("")


def test_64_ranks_to_48(memory: Storage) -> None:
    saver, loader = holdings(SAVED), holdings(LOADED)
    assert (saver.layout.world, loader.layout.world) == (64, 48)
    document = bench.assembled(memory, saver, bench.written(memory, saver, BLOCK))
    data = manifest.encode(document)
    document, decode_s = bench.timed(manifest.decode, document.path, data)
    elements = flops.parameters(saver.run.model, saver.vocabulary)
    assert document.nbytes == pytest.approx(12 * elements, rel=1e-3)  # parameters and two moments in four bytes each
    costs = [bench.cost(document, loader, rank, BLOCK) for rank in range(48)]
    assert sum(one.needed for one in costs) == pytest.approx(document.nbytes, rel=1e-3)  # norms are on each tp rank
    assert max(one.ratio for one in costs) <= 1.1
    assert decode_s + max(one.plan_s for one in costs) < 10
    assert max(len(one.shards) for one in costs) <= 4  # two of its own tp rank, and those that keep norms


def test_without_tiles_it_would_read_more(memory: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finer tp reads a part of each row."""
    saver, loader = holdings("dp=4,pp=2,tp=4"), holdings("dp=3,pp=2,tp=8")
    document = bench.assembled(memory, saver, bench.written(memory, saver, BLOCK))
    assert bench.cost(document, loader, 8, BLOCK).ratio < 1.1
    memory.delete("")
    monkeypatch.setattr(boxes, "TILES", 1)
    document = bench.assembled(memory, saver, bench.written(memory, saver, BLOCK))
    assert bench.cost(document, loader, 8, BLOCK).ratio > 1.2


def test_the_bench_tells_it_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--json", "--preset", "tiny", "--saved", "dp=2,pp=2,tp=2", "--loaded", "dp=3,pp=1,tp=2"]
    assert bench.main(few) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["ranks"], told["into"][0]["ranks"], told["into"][0]["planned"]) == (8, 6, 6)
    assert told["manifest_bytes"] > told["index_bytes"]["max"] > told["index_bytes"]["mean"] > 0
    assert told["into"][0]["read_over_needed"]["max"] > 1


class Noted(LocalStorage):
    """Notes the ranges that are read of shards."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.ranges: set[tuple[int, int]] = set()

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if start is not None and end is not None and path.endswith(".bin"):
            self.ranges.add((start, end))
        return super().read(path, start, end)

    def read_into(self, path: str, start: int, out: memoryview) -> int:
        self.ranges.add((start, start + len(out)))
        return super().read_into(path, start, out)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_load_reads_the_blocks_of_its_plan_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int
) -> None:
    monkeypatch.setattr(boxes, "TILE_BYTES", 1 << 20)
    plain = Storage.open(str(tmp_path))
    state = {name: torch.randn(3000, 500) for name in ("a", "b", "c")}
    pieces = logical.pieces(state, dict.fromkeys(state, dim))
    assert len(pieces) == (15 if dim else 3)
    record = shards.write(plain, manifest.folder(1, 1, "a"), 0, pieces)
    document = manifest.assemble(
        plain, job="j", step=1, attempt=1, token="a", layout={}, model={}, header={}, records=[record], created_at=0.0
    )
    noted = Noted(plain.fs, plain.root, plain.uri)
    asked = {name: tensor for name, tensor in state.items() if name != "b"}
    blank = {name: torch.zeros_like(tensor) for name, tensor in asked.items()}
    logical.load(blank, document, noted)
    assert all(torch.equal(blank[name], tensor) for name, tensor in asked.items())
    wanted = {name: Wanted((3000, 500), "float32", Box((0, 0), (3000, 500), False)) for name in asked}
    planned = {n for run in boxes.blocks(boxes.plan(wanted, document)[0], shards.BLOCK) for n in run}
    read = {n for start, end in noted.ranges for n in range(start // shards.BLOCK, -(-end // shards.BLOCK))}
    assert read == planned
    assert len(planned) < -(-record.nbytes // shards.BLOCK)


@pytest.mark.parametrize("saved", ["tp on columns", "fsdp and tp on columns", "hsdp and tp on columns", "fsdp"])
def test_tiles_of_any_layout_fill_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str) -> None:
    storage, state, layouts = Storage.open(str(tmp_path)), ranks.some_state("matrices"), ranks.MATRIX_LAYOUTS
    whole = ranks.save(storage, layouts[saved], state, 1)
    monkeypatch.setattr(boxes, "TILE_BYTES", 8)
    document = ranks.save(storage, layouts[saved], state, 2)
    assert len(document.tensors["columns"].pieces) > len(whole.tensors["columns"].pieces)
    for into in layouts.values():
        for rank in range(into.world):
            with ranks.as_rank(rank, into.world):
                blank = into.shard({name: torch.zeros_like(full) for name, full in state.items()}, rank)
                logical.load(blank, document, storage)
                for name, full in state.items():
                    assert torch.equal(blank[name].to_local(), into.local(full, rank)), name
