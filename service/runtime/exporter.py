"""Writes a checkpoint's model as a Hugging Face folder, as a Ray task: its memory is a node's, not the controller's."""

from __future__ import annotations

import ray


def export(storage: str, path: str, to: str, dtype: str | None, adapter: bool = False) -> str:
    """Why the manifest at `path` in a job's `storage` could not be exported to the folder `to`; empty: it was."""
    from workers.checkpoint import manifest
    from workers.checkpoint.shards import Corrupt
    from workers.checkpoint.storage import Storage
    from workers.models import adapters

    try:
        source = Storage.open(storage)
        adapters.export(source, manifest.load(source, path), to, dtype=dtype, adapter=adapter)
    except (ValueError, OSError, manifest.BadCheckpoint, Corrupt) as error:  # not all of them can be pickled
        return str(error) or repr(error)
    return ""


task = ray.remote(num_cpus=0, max_retries=0)(export)
