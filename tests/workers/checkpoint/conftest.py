"""Checkpoints of plain bytes, made without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from workers.checkpoint import manifest, shards
from workers.checkpoint.manifest import Manifest
from workers.checkpoint.shards import Piece, Region
from workers.checkpoint.storage import Storage

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, extent


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage.open(str(tmp_path / "job"))


@pytest.fixture
def piece() -> Callable[..., Piece]:
    """A piece of uint8 filled with one value."""

    def make(offset: Sequence[int], extent: Sequence[int], shape: Sequence[int], value: int = 7, name: str = "w"):
        region = Region(name, tuple(shape), "uint8", tuple(range(len(shape))), tuple(offset), tuple(extent))
        return Piece(region, lambda: bytes([value]) * region.nbytes)

    return make


@pytest.fixture
def checkpoint(piece: Callable[..., Piece]) -> Callable[..., Manifest]:
    """A checkpoint that two ranks wrote, assembled and not published."""

    def make(storage: Storage, step: int, attempt: int = 1, token: str = "", rows: int = 2000, value: int = 7):
        token = token or f"t{attempt}"
        folder = manifest.folder(step, attempt, token)
        halves = ((0, 0), (rows, 0))
        records = [
            shards.write(storage, folder, rank, [piece(at, (rows, 1024), (2 * rows, 1024), value + rank)])
            for rank, at in enumerate(halves)
        ]
        return manifest.assemble(
            storage,
            job="job-1",
            step=step,
            attempt=attempt,
            token=token,
            layout={"dp": 2, "pp": 1, "tp": 1},
            model={"layers": 1},
            header={"samples": step * 8, "ledger": [{"attempt": attempt, "start": 0, "end": step * 8}]},
            records=records,
            created_at=1_700_000_000.25,
        )

    return make
