"""Named bytes on any file system that fsspec knows. Knows nothing of checkpoints.

What is written is never written again: every write creates, and fails with FileExistsError where something is
already there. Nothing half-written is seen under its final name. Paths are relative to the storage's root.
Calls may come from several threads.

| where | how "only if not there" is held |
|---|---|
| a local path | a temporary file beside it, synced, then a hard link: atomic, on NFS as well |
| `s3://` | a conditional request (`If-None-Match`): atomic |
| others | fsspec's `mode="create"`: as atomic as that is there; some only look first |
| | and can't tell two writers at the same moment apart |
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from fsspec.core import url_to_fs

UNFINISHED = ".unfinished"  # suffix of local temporary files; they start with a dot as well
CONFLICT_TRIES = 5

_one_at_a_time = threading.Lock()


class Storage:
    """A folder of objects. This class does for any fsspec file system; two kinds have their own below."""

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
        fs, root = url_to_fs(uri, use_listings_cache=False)
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        kind = LocalStorage if "file" in protocols else S3Storage if "s3" in protocols else Storage
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

    def size(self, path: str) -> int:
        return int(self.fs.size(self._full(path)))

    def exists(self, path: str) -> bool:
        """Whether an object has this name; a folder is none."""
        return bool(self.fs.isfile(self._full(path)))

    def names(self, prefix: str = "") -> list[str]:
        """Sorted paths of all objects in this folder, at any depth; none where there is no such folder."""
        start = len(self.root) + 1
        return sorted(name[start:] for name in self.fs.find(self._full(prefix)) if not name.endswith("/"))

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
                yield out
                out.flush()
                os.fsync(out.fileno())
            _link(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)
        for folder in {final.parent, *(folder.parent for folder in made)}:
            _sync(folder)

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        with Path(self._full(path)).open("rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(max(0, end - (start or 0)))

    def names(self, prefix: str = "") -> list[str]:
        top = self._full(prefix)
        if Path(top).is_file():
            found = [top]
        else:
            walk = os.walk(top, onerror=_unless_missing)
            found = [f"{folder}/{name}" for folder, _, files in walk for name in files if not _unfinished(name)]
        return sorted(name[len(self.root) + 1 :] for name in found)

    def delete(self, prefix: str) -> None:
        path = Path(self._full(prefix))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class S3Storage(Storage):
    """A prefix of a bucket. Big objects go up in parts while they are written."""

    def create(self, path: str, data: bytes) -> None:
        for attempt in range(CONFLICT_TRIES):
            with _translated(self.uri, path):
                try:
                    self.fs.pipe_file(self._full(path), data, mode="create")
                    return
                except OSError as error:
                    # Another conditional request for this name is under way: its end decides ours.
                    if _code(error) != "ConditionalRequestConflict" or attempt == CONFLICT_TRIES - 1:
                        raise
            time.sleep(0.1 * 2**attempt)

    @contextlib.contextmanager
    def write_stream(self, path: str) -> Iterator[BinaryIO]:
        self._refuse_existing(path)
        out = self.fs.open(self._full(path), "xb")
        try:
            yield out
            if out.tell():
                with _translated(self.uri, path):
                    out.close()
        except BaseException:
            out.discard()
            raise
        finally:
            empty, out.closed = not out.tell(), True  # closed here for good: a collected file must not commit
        if empty:
            self.create(path, b"")

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if end is not None and end <= (start or 0):
            return b""
        try:
            return bytes(self.fs.cat_file(self._full(path), start=start, end=end))
        except OSError as error:
            if _code(error) not in ("InvalidRange", "416"):
                raise
            return b""


def _unless_missing(error: OSError) -> None:
    """A folder that is not there has no objects; one that can't be read may have some."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _link(temporary: Path, final: Path) -> None:
    try:
        final.hardlink_to(temporary)
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


def _unfinished(name: str) -> bool:
    return name.startswith(".") and name.endswith(UNFINISHED)


def _code(error: BaseException) -> str:
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


@contextlib.contextmanager
def _translated(uri: str, path: str) -> Iterator[None]:
    """A refused condition is FileExistsError, also from stores that leave out which condition it was."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileExistsError) or _code(error) in ("PreconditionFailed", "412"):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{uri}/{path}") from error
        raise
