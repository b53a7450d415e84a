"""The memory tier as a folder: what every rank of a test writes to and reads from."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict

from workers.checkpoint import manifest
from workers.checkpoint.shards import ShardRecord
from workers.checkpoint.storage import Storage
from workers.reports import ShardSaved


class Shelf:
    def __init__(self, storage: Storage, manifests: tuple[str, ...] = (), room: int = 1 << 30) -> None:
        self.storage, self.manifests, self.room = storage, manifests, room
        self.held: list[ShardSaved] = []
        self.trouble: OSError | None = None

    def admit(self, nbytes: int) -> str:
        return "" if nbytes <= self.room else f"{nbytes} bytes do not fit"

    def hold(self, record: ShardSaved) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.held.append(record)
        self.storage.create(f"records/{record.index}", json.dumps(asdict(record)).encode())

    @contextlib.contextmanager
    def pinned(self, record: ShardSaved) -> Iterator[Storage]:
        yield self.storage


def assembled(storage: Storage, step: int) -> str:
    """Publish the snapshot of a step there; its manifest."""
    names = [name for name in storage.names("records") if f"/{step:010d}/" in name]
    records = [ShardSaved(**json.loads(storage.read(name))) for name in names]
    attempt, _, _ = manifest.generation(records[0].index.rpartition("/")[0])
    document = manifest.assemble(
        storage, job="run", step=step, attempt=attempt, token=manifest.token_of(records[0].index), layout={}, model={},
        header=records[0].header, records=[ShardRecord(r.index, r.index_digest, r.nbytes) for r in records],
        created_at=0.0,
    )  # fmt: skip
    return manifest.publish(storage, document)
