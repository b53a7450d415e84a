"""Ships the output files of a node's ranks to storage as chunks of JSON lines, with a cap. Knows no Ray.

A chunk is `logs/{attempt:06d}-{node}/{number:06d}.jsonl`; its lines are what the API streams, so that logs outlive the
processes and the node.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from workers.checkpoint.storage import Storage

CHUNK_BYTES = 256 * 1024
RANK_CAP_BYTES = 32 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Lines that are in storage now."""

    attempt: int
    node: str
    path: str
    lines: int
    at: float


class Shipper:
    """Reads what was added to `{folder}/{rank}.{out|err}` since the last call, whole lines only."""

    def __init__(self, folder: Path, storage: Storage, attempt: int, node: str, cap: int = RANK_CAP_BYTES) -> None:
        self.folder, self.storage, self.attempt, self.node, self.cap = folder, storage, attempt, node, cap
        self.offsets: dict[Path, int] = {}
        self.number = 0

    def ship(self, last: bool = False) -> list[Chunk]:
        """Write new lines to storage, in chunks. `last` also takes a line without its end. Raises OSError; a failed chunk is retried."""
        chunks: list[Chunk] = []
        for path in sorted(self.folder.glob("*.*")):
            while lines := self._lines(path, last):
                chunks.append(self._write(path, lines))
        return chunks

    def _lines(self, path: Path, last: bool) -> tuple[list[str], int] | None:
        """(lines, offset after them); past the cap one line that says so, then nothing."""
        offset = self.offsets.get(path, 0)
        if offset > self.cap:
            return None
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(CHUNK_BYTES)
        end = data.rfind(b"\n") + 1
        if end == 0 and (last or len(data) == CHUNK_BYTES):
            end = len(data)
        if end == 0:
            return None
        lines = data[:end].decode(errors="replace").splitlines()
        if offset + end > self.cap:
            lines.append(f"[output beyond {self.cap} bytes is not shipped; the node keeps it in {path}]")
        return lines, offset + end

    def _write(self, path: Path, taken: tuple[list[str], int]) -> Chunk:
        lines, offset = taken
        rank, at = int(path.stem), time.time()
        rows = (
            {"at": at, "attempt": self.attempt, "rank": rank, "node": self.node, "stream": path.suffix[1:], "text": text}
            for text in lines
        )
        name = f"logs/{self.attempt:06d}-{self.node}/{self.number:06d}.jsonl"
        self.storage.create(name, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self.number += 1
        self.offsets[path] = offset
        return Chunk(self.attempt, self.node, name, len(lines), at)
