"""Brings the archive of a job's own code to a node, once, and checks that it is the one that was submitted."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import fsspec

from service.contracts.errors import UserError

PIECE = 1 << 20
MOST_BYTES = 2 << 30  # unpacked


class NoCode(UserError):
    """The archive is not the one that was submitted, or none."""


def enter(uri: str, digest: str, folder: Path) -> Path:
    """This process stands in the unpacked archive from now on, and imports from it first."""
    place = unpacked(uri, digest, folder)
    os.chdir(place)
    sys.path.insert(0, str(place))
    return place


def unpacked(uri: str, digest: str, folder: Path) -> Path:
    """`{folder}/{digest}`. Whoever comes first makes it; others may come at the same time. NoCode: it is another
    archive by now."""
    place = folder / digest
    if place.is_dir():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".code-", dir=folder))
    try:
        found = _fetched(uri, draft / "archive.zip")
        if found != digest:
            raise NoCode(
                f"runtime.working_dir: {uri} is not what it was when the job was submitted",
                hint="archives of code that runs are not replaced: write a new one, and submit it",
                field="runtime.working_dir",
            )
        _unpack(draft / "archive.zip", draft / "code")
        try:
            (draft / "code").rename(place)
        except OSError:
            if not place.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return place


def _fetched(uri: str, path: Path) -> str:
    digest = hashlib.sha256()
    with fsspec.open(uri, "rb") as source, path.open("wb") as copy:
        while piece := source.read(PIECE):
            digest.update(piece)
            copy.write(piece)
    return digest.hexdigest()


def _unpack(archive: Path, place: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        if sum(entry.file_size for entry in opened.infolist()) > MOST_BYTES:
            raise NoCode(f"runtime.working_dir: it is more than {MOST_BYTES >> 30} GiB unpacked")
        opened.extractall(place)  # which leads no name out of the folder
