"""Named bytes on any file system that fsspec knows. Knows nothing of checkpoints.

What is written is never written again: every write creates, and fails with FileExistsError where something is
already there. Nothing half-written is seen under its final name, and what a killed writer left behind is swept.
Paths are relative to the storage's root. Calls may come from several threads.

| where | how "only if not there" is held |
|---|---|
| a local path | a temporary file beside it, synced, then a hard link: atomic, on NFS as well |
| `s3://` | a conditional request (`If-None-Match`): atomic; see `s3.py` |
| others | fsspec's `mode="create"`: as atomic as that is there; some only look first |
| | and can't tell two writers at the same moment apart |
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar, cast

from fsspec.core import split_protocol, url_to_fs

from workers.checkpoint.writeback import Early

UNFINISHED = ".unfinished"  # suffix of local temporary files; they start with a dot as well
CHANGED = ("mtime", "LastModified", "last_modified", "updated", "created")  # what file systems call that time

_one_at_a_time = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class Object:
    """What a listing tells of an object."""

    nbytes: int
    modified: float  # Unix seconds, by the store's clock; now, where it doesn't tell: never old by mistake


class Storage:
    """A folder of objects. This class does for any fsspec file system; two kinds have their own."""

    options: ClassVar[Mapping[str, Any]] = {}  # of the fsspec file system

    def __init__(self, fs: Any, root: str, uri: str) -> None:
        self.fs = fs
        self.root = root.rstrip("/")
        self.uri = uri.rstrip("/")
        # File systems that aren't asynchronous may share one position per file between readers.
        self._turn = contextlib.nullcontext() if fs.async_impl else _one_at_a_time

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    @staticmethod
    def open(uri: str) -> Storage:
        """The storage at a path or an fsspec URI. Listings are never cached: others write here too."""
        if "::" in uri:
            raise ValueError(f"{uri!r} chains file systems; give the plain URI of the store itself")
        kind = _kind(split_protocol(uri)[0])
        fs, root = url_to_fs(uri, use_listings_cache=False, **kind.options)
        return kind(fs, root, uri)

    def child(self, path: str) -> Storage:
        """The storage whose root is this folder."""
        return type(self)(self.fs, self._full(path), f"{self.uri}/{path}")

    def create(self, path: str, data: bytes) -> None:
        with self._turn:
            self.fs.pipe_file(self._full(path), data, mode="create")

    @contextlib.contextmanager
    def write_stream(self, path: str) -> Iterator[BinaryIO]:
        """A file to write to, seen under `path` when the block ends without an error and not before."""
        self._refuse_existing(path)
        with tempfile.NamedTemporaryFile() as spool:
            yield cast(BinaryIO, spool)
            spool.flush()
            with self._turn:
                self.fs.put_file(spool.name, self._full(path), mode="create")

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """All bytes, or those of [start, end) that are there."""
        with self._turn:
            return bytes(self.fs.cat_file(self._full(path), start=start, end=end))

    def read_into(self, path: str, start: int, out: memoryview) -> int:
        """Fill `out` with the bytes from `start` on; how many were there."""
        data = self.read(path, start, start + len(out))
        out[: len(data)] = data
        return len(data)

    def size(self, path: str) -> int:
        return int(self.fs.size(self._full(path)))

    def exists(self, path: str) -> bool:
        """Whether an object has this name; a folder is none."""
        return bool(self.fs.isfile(self._full(path)))

    def objects(self, prefix: str = "") -> dict[str, Object]:
        """All objects in this folder, at any depth, by path, as the store lists them now; none where there is no
        such folder.
        """
        self.fs.invalidate_cache()
        found, start = self.fs.find(self._full(prefix), detail=True), len(self.root) + 1
        return {
            name[start:]: Object(int(info["size"]), _changed(info))
            for name, info in found.items()
            if not name.endswith("/")
        }

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of each object in this folder, by path."""
        return {path: found.nbytes for path, found in self.objects(prefix).items()}

    def names(self, prefix: str = "") -> list[str]:
        """Sorted paths of all objects in this folder."""
        return sorted(self.objects(prefix))

    def abandoned(self, prefix: str, older_than_s: float) -> list[str]:
        """Paths in this folder whose writer began so long ago, left something half-written and may be dead."""
        return []

    def sweep(self, prefix: str, older_than_s: float) -> list[str]:
        """Remove what `abandoned` names; what was removed. A writer that still lives gets an OSError."""
        return []

    def delete(self, prefix: str) -> None:
        """Remove an object, or a folder with all in it. What is not there is as good as removed."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self._full(prefix), recursive=True)

    def _full(self, path: str) -> str:
        parts = PurePosixPath(path).parts
        if path.startswith("/") or ".." in parts:
            raise ValueError(f"{path!r} is not a path inside {self.uri}")
        return "/".join((self.root, *parts))

    def _refuse_existing(self, path: str) -> None:
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.uri}/{path}")


class LocalStorage(Storage):
    """A folder of this machine, or one mounted on it."""

    def create(self, path: str, data: bytes) -> None:
        with self.write_stream(path) as out:
            out.write(data)

    @contextlib.contextmanager
    def write_stream(self, path: str) -> Iterator[BinaryIO]:
        self._refuse_existing(path)
        final = Path(self._full(path))
        made = [folder for folder in final.parents if not folder.exists()]
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:  # FileExistsError is said of the object itself, and of nothing above it
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(final.parent)) from error
        temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex}{UNFINISHED}")
        try:
            with temporary.open("xb") as out:
                yield cast(BinaryIO, Early(cast(BinaryIO, out)))
                out.flush()
                os.fsync(out.fileno())
            _link(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)
        for folder in {final.parent, *(folder.parent for folder in made)}:
            _sync(folder)

    def read_into(self, path: str, start: int, out: memoryview) -> int:
        done = 0
        with Path(self._full(path)).open("rb", buffering=0) as file:
            file.seek(start)
            while done < len(out) and (count := file.readinto(out[done:])):
                done += count
        return done

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        with Path(self._full(path)).open("rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(max(0, end - (start or 0)))

    def objects(self, prefix: str = "") -> dict[str, Object]:
        found = {}
        for path in self.names(prefix):
            with contextlib.suppress(FileNotFoundError):
                stat = Path(self._full(path)).stat()
                found[path] = Object(stat.st_size, stat.st_mtime)
        return found

    def names(self, prefix: str = "") -> list[str]:
        return sorted(path for path in self._files(prefix) if not _unfinished(path))

    def abandoned(self, prefix: str, older_than_s: float) -> list[str]:
        before, found = time.time() - older_than_s, []
        for path in filter(_unfinished, self._files(prefix)):
            with contextlib.suppress(FileNotFoundError):
                if Path(self._full(path)).stat().st_mtime < before:
                    found.append(path)
        return sorted(found)

    def sweep(self, prefix: str, older_than_s: float) -> list[str]:
        found = self.abandoned(prefix, older_than_s)
        for path in found:
            Path(self._full(path)).unlink(missing_ok=True)
        return found

    def _files(self, prefix: str) -> Iterator[str]:
        """Paths of all files in this folder, unfinished ones too."""
        top, start = self._full(prefix), len(self.root) + 1
        if Path(top).is_file():
            yield top[start:]
            return
        for folder, _, files in os.walk(top, onerror=_unless_missing):
            yield from (f"{folder}/{name}"[start:] for name in files)

    def delete(self, prefix: str) -> None:
        path = Path(self._full(prefix))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _kind(protocol: str | None) -> type[Storage]:
    if protocol in (None, "file", "local"):
        return LocalStorage
    if protocol in ("s3", "s3a"):
        from workers.checkpoint.s3 import S3Storage  # its libraries are for those only that have such a storage

        return S3Storage
    return Storage


def _unless_missing(error: OSError) -> None:
    """A folder that is not there has no objects; one that can't be read may have some."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _link(temporary: Path, final: Path) -> None:
    try:
        final.hardlink_to(temporary)
    except FileNotFoundError as error:
        raise OSError(errno.EIO, "what was written is gone: somebody swept it", str(final)) from error
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        hint = "no hard links here, and only they publish a file at once; use another folder or an object store"
        raise OSError(error.errno, hint, str(final)) from error


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unfinished(path: str) -> bool:
    return PurePosixPath(path).name.startswith(".") and path.endswith(UNFINISHED)


def _changed(info: Mapping[str, Any]) -> float:
    for key in CHANGED:
        match info.get(key):
            case int() | float() as seconds:
                return float(seconds)
            case datetime.datetime() as moment:
                return moment.timestamp()
    return time.time()
