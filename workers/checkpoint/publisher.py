"""Publishes the checkpoints of one attempt once every rank's shard is in storage, and removes old ones.

The controller does this in the service, rank 0 under torchrun. Knows no torch, and not which checkpoints may go:
`retention.py` does.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from workers.checkpoint import manifest
from workers.checkpoint.retention import Policy, Retention
from workers.checkpoint.shards import ShardRecord
from workers.checkpoint.storage import Storage
from workers.reports import ShardSaved
from workers.spec import RunSpec


class Publisher:
    """Of attempt `attempt` of `job`; `storage` is the job's own folder. Whoever makes a publisher for each checkpoint
    keeps one `retention` for all of them: it remembers what it has looked at.
    """

    def __init__(
        self, storage: Storage, job: str, attempt: int, token: str, run: RunSpec, retention: Retention | None = None
    ) -> None:
        self.storage, self.job, self.attempt, self.token, self.run = storage, job, attempt, token, run
        self.retention = retention or Retention(storage, Policy(run.checkpoint.keep, run.checkpoint.keep_every))

    def publish(self, step: int, saved: Iterable[ShardSaved]) -> str:
        """The manifest's path. Incomplete or Corrupt: the shards are not a whole. OSError: storage is away."""
        records = list(saved)
        headers = {repr(record.header) for record in records}
        if len(headers) != 1:
            raise manifest.Incomplete(f"ranks disagree on the state beside the tensors at step {step}")
        document = manifest.assemble(
            self.storage, job=self.job, step=step, attempt=self.attempt, token=self.token,
            layout=self.run.parallel.model_dump(), model=self.run.model.model_dump(), header=records[0].header,
            records=[ShardRecord(record.index, record.index_digest, record.nbytes) for record in records],
            created_at=time.time(),
        )  # fmt: skip
        return manifest.publish(self.storage, document)

    def retain(
        self, rejected: Collection[str] = (), protect: Collection[str] = (), best: int | None = None
    ) -> list[str]:
        """Remove the checkpoints that need not stay; what was removed. Of manifests' paths, `rejected` ones are no good
        and `protect` ones stay; and so does the step of the `best` evaluation.
        """
        return self.retention.apply(rejected, protect, best)


def newest_attempt(storage: Storage) -> int:
    """The highest attempt that has written anything under `storage`; 0 when none has."""
    folders = {manifest.folder_of(name) for name in storage.names(manifest.FOLDERS)}
    return max((manifest.generation(folder)[0] for folder in folders if folder), default=0)
