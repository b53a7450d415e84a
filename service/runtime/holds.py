"""Keeps a checkpoint in storage while someone reads it, whoever else keeps house there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from workers.checkpoint import retention
from workers.checkpoint.storage import Storage

HOLD_S = 6 * 3600.0  # at most: who holds it may die


@contextlib.contextmanager
def held(storage: Storage, path: str) -> Iterator[None]:
    """No retention removes the manifest at `path`, nor its shards, within the block.

    FileNotFoundError where it is not there; nothing is then written to what may be a folder that is not mounted.
    """
    _check(storage, path)
    with retention.hold(storage, path, HOLD_S):
        _check(storage, path)  # it may have gone before the hold was seen
        yield


def _check(storage: Storage, path: str) -> None:
    if not storage.exists(path):
        raise FileNotFoundError(f"{path} is not in {storage.uri}: was it removed, or is the storage not mounted?")
