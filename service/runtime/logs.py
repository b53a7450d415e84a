"""Ships the output files of a node's ranks to storage as chunks of JSON lines, with a cap. Knows no Ray.

A chunk is `logs/{attempt:06d}-{node}/{number:06d}.jsonl`; its lines are what the API streams, so that logs outlive the
processes and the node.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from workers.checkpoint.storage import Storage

CHUNK_BYTES = 256 * 1024
CAP_BYTES = 32 * 1024 * 1024  # of one rank and stream
STREAMS = (".out", ".err")


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Lines that are in storage now."""

    attempt: int
    node: str
    path: str
    lines: int
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class Unsent:
    """A chunk on its way. It is tried again as it is, so that no line is doubled when a failed try did arrive."""

    source: Path
    offset: int  # in the source, after the chunk's lines
    lines: int
    data: bytes
    at: float


class Shipper:
    """Reads what was added to `{folder}/{rank}.{out|err}` since the last call, whole lines only."""

    def __init__(
        self,
        folder: Path,
        storage: Storage,
        attempt: int,
        node: str,
        cap: int = CAP_BYTES,
        redact: Callable[[str], str] = str,
    ) -> None:
        self.folder, self.storage, self.attempt, self.node, self.cap = folder, storage, attempt, node, cap
        self.redact = redact  # of each line
        self.offsets: dict[Path, int] = {}
        self.number = 0
        self.unsent: Unsent | None = None

    def ship(self, last: bool = False) -> Iterator[Chunk]:
        """Write new lines to storage; each chunk once it is there. `last` also takes a line without its end.

        Raises OSError; the next call goes on with the chunk that failed.
        """
        if self.unsent is not None:
            yield self._send(self.unsent)
        for path in self._sources():
            while (taken := self._taken(path, last)) is not None:
                self.unsent = self._packed(path, *taken)
                yield self._send(self.unsent)

    def done(self) -> bool:
        """Whether all there is has been shipped."""
        return self.unsent is None and all(self._taken(path, True) is None for path in self._sources())

    def _sources(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.*") if path.stem.isdecimal() and path.suffix in STREAMS)

    def _taken(self, path: Path, last: bool) -> tuple[list[str], int] | None:
        """(lines, offset after them); past the cap one line that says so, then nothing."""
        offset = self.offsets.get(path, 0)
        if offset > self.cap:
            return None
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(CHUNK_BYTES)
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) == CHUNK_BYTES:
            end = len(data) - _torn(data)
        if end == 0 and last:
            end = len(data)
        if end == 0:
            return None
        lines = data[:end].decode(errors="replace").removesuffix("\n").split("\n")
        if offset + end > self.cap:
            lines.append(f"[the rest is left out: no more than {self.cap} bytes of a rank's output are kept]")
        return lines, offset + end

    def _packed(self, path: Path, lines: Sequence[str], offset: int) -> Unsent:
        at, rank, stream = time.time(), int(path.stem), path.suffix[1:]
        where = {"at": at, "attempt": self.attempt, "rank": rank, "node": self.node, "stream": stream}
        data = "".join(json.dumps({**where, "text": self.redact(text)}) + "\n" for text in lines).encode()
        return Unsent(path, offset, len(lines), data, at)

    def _send(self, unsent: Unsent) -> Chunk:
        while True:
            name = f"logs/{self.attempt:06d}-{self.node}/{self.number:06d}.jsonl"
            arrived = self._create(name, unsent.data)
            self.number += 1
            if arrived:
                self.unsent = None
                self.offsets[unsent.source] = unsent.offset
                return Chunk(self.attempt, self.node, name, unsent.lines, unsent.at)

    def _create(self, name: str, data: bytes) -> bool:
        """False when something else has this name: a try of ours that was cut short, where storage allows that."""
        try:
            self.storage.create(name, data)
        except FileExistsError:
            return self.storage.read(name) == data
        return True


def _torn(data: bytes) -> int:
    """Bytes at the end that are the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])
