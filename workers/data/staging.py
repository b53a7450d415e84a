"""Files of prepared tokens on this node: those of a local path as they are, those of an object store as copies.

Copies are in one folder of the node, which all ranks share, and take no more than so many bytes: what was not used for
the longest goes first. A copy is checked once, when it is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import xxhash
from fsspec.core import split_protocol, url_to_fs

from workers.data.text import DataError

PIECE = 1 << 22
LOCAL = (None, "", "file", "local")


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    folder: Path
    most_bytes: int

    @classmethod
    def of_node(cls) -> Stage:
        """As the node's environment says: PHALANX_DATA_CACHE, PHALANX_DATA_CACHE_BYTES."""
        folder = os.environ.get("PHALANX_DATA_CACHE") or f"{tempfile.gettempdir()}/phalanx-data-{os.getuid()}"
        return cls(Path(folder), int(os.environ.get("PHALANX_DATA_CACHE_BYTES") or 64 << 30))

    def local(self, uri: str, nbytes: int, digest: str) -> Path:
        """Where the file can be mapped from. DataError: it is not there, or not what it was."""
        if split_protocol(uri)[0] in LOCAL:
            return _sized(Path(str(split_protocol(uri)[1])), nbytes)
        self.folder.mkdir(parents=True, exist_ok=True)
        copy = self.folder / digest
        with self._turn(digest):
            if not copy.exists():
                self._fetch(uri, copy, digest)
                self._make_room(copy)
        with contextlib.suppress(FileNotFoundError):
            os.utime(copy)
        return _sized(copy, nbytes)

    @contextlib.contextmanager
    def _turn(self, digest: str) -> Iterator[None]:
        """One process of the node at a time, for each file."""
        with (self.folder / f".{digest}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _fetch(self, uri: str, copy: Path, digest: str) -> None:
        fs, path = url_to_fs(uri)
        found = xxhash.xxh3_128()
        draft = copy.with_name(f".{copy.name}.{os.getpid()}")
        try:
            with fs.open(path, "rb") as source, draft.open("wb") as out:
                while piece := source.read(PIECE):
                    found.update(piece)
                    out.write(piece)
            if found.hexdigest() != digest:
                raise DataError(f"{uri} is not what was prepared: its digest is {found.hexdigest()}, not {digest}")
            draft.rename(copy)
        except FileNotFoundError:
            raise DataError(f"{uri} is not there") from None
        finally:
            draft.unlink(missing_ok=True)

    def _make_room(self, newest: Path) -> None:
        """A copy that is mapped stays readable to who maps it."""
        copies = [(path.stat().st_mtime, path.stat().st_size, path) for path in self.folder.glob("[0-9a-f]*")]
        left = sum(size for _, size, _ in copies) - self.most_bytes
        for _, size, path in sorted(copies):
            if left <= 0:
                return
            if path != newest:
                path.unlink(missing_ok=True)
                left -= size


def _sized(path: Path, nbytes: int) -> Path:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"{path} is not there") from None
    if found != nbytes:
        raise DataError(f"{path} has {found} bytes, and {nbytes} were prepared: `phalanx data verify` tells more")
    return path
