"""Saves a rank's state while it trains on: copies in the caller's thread, writes in others.

A save goes to storage, to memory, or to both: then storage is written from memory, and the copies are free at once.
One of each kind is under way at most. Knows shards and this rank's assignment; not who assembles and publishes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from workers import reports
from workers.checkpoint import logical, manifest, shards
from workers.checkpoint.copies import Copies
from workers.checkpoint.memory import Memory
from workers.checkpoint.retry import Retry
from workers.checkpoint.shards import Piece, Reader, ShardRecord
from workers.checkpoint.storage import Storage
from workers.spec import Assignment

CHUNK = 16 << 20  # copied at once from memory to storage
NOTHING: Mapping[str, Any] = MappingProxyType({})
PATIENCE_S = 5.0  # that a save waits for the one before it, which then tries no more
RETRIES = Retry(deadline_s=540.0)  # less than a job waits for its last save (liveness.Limits.saving_s)


class Saver:
    """`save` blocks its thread for the copy only, and for a while where the save before it is not written yet.

    Every save ends in one report, ShardSaved or SaveFailed, and every snapshot in SnapshotTaken or SnapshotFailed, made
    in a writing thread; a failed save is an event and no exception. Storage that is away is tried again, until the next
    save is due. What does raise, from the next `save` or `close`, is a `report` that failed.
    """

    def __init__(
        self,
        storage: Storage,
        assignment: Assignment,
        report: Callable[[reports.Report], None],
        memory: Memory | None = None,
        retry: Retry = RETRIES,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.storage = storage  # of the job
        self.assignment = assignment
        self.report = report
        self.memory = memory
        self.retry, self.patience_s = retry, patience_s
        self.cost_s = 0.0  # of the last snapshot
        self.copies = Copies()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-write")  # of what is in the copies
        self._uploader = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-upload")  # of what is in memory
        self._writing: Future[None] | None = None
        self._saving: Future[None] | None = None  # to storage
        self._saving_step = 0
        self._hurry = threading.Event()
        self._admitted: int | None = None  # bytes that memory takes; 0: none

    @property
    def busy(self) -> bool:
        """Whether the copies are in use."""
        return not (self._writing is None or self._writing.done())

    @property
    def lacking(self) -> bool:
        """Whether there is no memory for snapshots."""
        return self.memory is None or self._admitted == 0

    def save(
        self,
        step: int,
        state: logical.State,
        slices: logical.Slices,
        header: Mapping[str, Any],
        owner: bool | None = None,
        *,
        durable: bool = True,
        snapshot: bool = False,
        told: Mapping[str, Any] = NOTHING,
    ) -> None:
        """Save this rank's pieces of `state` as they are now; `slices` and `owner` as in `logical.pieces`.

        The header of the snapshot has what is in `told` too.
        """
        began = time.perf_counter()
        if durable and not self._clear_way():
            reason = f"the save of step {self._saving_step} is still being written"
            self.report(reports.SaveFailed(step, self.assignment.rank, reason))
            durable = False
        if not durable and not snapshot:
            return
        self._finish_writing()
        try:
            pieces = logical.pieces(state, slices, owner, self.copies.take)
            taken = self.copies.taken()
        except Exception as error:
            self.report(self._failed(step, error) if durable else self._forgotten(step, error))
            return
        stall = time.perf_counter() - began
        saving: Future[None] | None = None
        if durable:
            saving = self._saving = Future()
            self._saving_step = step
        remembered = {**header, **told} if snapshot else None
        self._writing = self._writer.submit(self._write, step, taken, pieces, dict(header), stall, saving, remembered)

    def wait(self) -> None:
        """Until what is under way, if anything, was reported."""
        self._finish_writing()
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._uploader.shutdown()

    def _clear_way(self) -> bool:
        """Whether the save before, told to try no more, has come to its end."""
        if self._saving is None:
            return True
        self._hurry.set()
        try:
            self._saving.result(self.patience_s)
        except TimeoutError:
            return False
        self._hurry.clear()
        self._saving = None
        return True

    def _finish_writing(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(
        self,
        step: int,
        taken: Callable[[], None],
        pieces: Sequence[Piece],
        header: dict[str, Any],
        stall: float,
        saving: Future[None] | None,
        remembered: dict[str, Any] | None,
    ) -> None:
        """`remembered`: the snapshot's header, where one is taken."""
        taken()
        kept = None if remembered is None else self._remember(step, pieces, remembered, stall)
        if saving is None:
            return
        folder = self._folder(step)

        def write() -> ShardRecord:
            return shards.write(self.storage, folder, self.assignment.rank, pieces)

        if kept is None:
            _settle(saving, lambda: self._store(step, write, header, stall))
        else:
            self._uploader.submit(_settle, saving, lambda: self._upload(kept, header))

    def _remember(
        self, step: int, pieces: Sequence[Piece], header: dict[str, Any], stall: float
    ) -> reports.ShardSaved | None:
        """The snapshot's shard, once it is in its two places; None where it could not be kept."""
        assert self.memory is not None
        began = time.perf_counter()
        try:
            if not self._admit(step, sum(piece.region.nbytes for piece in pieces)):
                return None
            record = shards.write(self.memory.storage, self._folder(step), self.assignment.rank, pieces)
            saved = self._saved(step, record, header, stall)
            self.memory.hold(saved)
        except Exception as error:
            self.report(self._forgotten(step, error))
            return None
        self.cost_s = stall
        if self.assignment.device == "cpu":  # what writes, keeps and copies takes cores from what computes
            self.cost_s += time.perf_counter() - began
        self.report(reports.SnapshotTaken(step, saved.rank, saved.nbytes, stall))
        return saved

    def _admit(self, step: int, nbytes: int) -> bool:
        if self._admitted is None:
            assert self.memory is not None
            refusal = self.memory.admit(nbytes)
            self._admitted = 0 if refusal else max(1, nbytes)
            if refusal:
                self.report(reports.SnapshotFailed(step, self.assignment.rank, refusal))
        return bool(self._admitted)

    def _upload(self, saved: reports.ShardSaved, header: dict[str, Any]) -> None:
        assert self.memory is not None
        with self.memory.pinned(saved) as source:
            reader = Reader(source, saved.index, saved.index_digest)

            def write() -> ShardRecord:
                with self.storage.write_stream(reader.path) as out:
                    for start in range(0, reader.index.nbytes, CHUNK):
                        out.write(reader.read(start, min(start + CHUNK, reader.index.nbytes)))
                self.storage.create(saved.index, source.read(saved.index))
                return ShardRecord(saved.index, saved.index_digest, saved.nbytes)

            self._store(saved.step, write, header, saved.stall_s)

    def _store(self, step: int, write: Callable[[], ShardRecord], header: dict[str, Any], stall: float) -> None:
        """Write to storage and report; tried again while it is away."""
        tries = 0

        def once() -> ShardRecord:
            nonlocal tries
            tries += 1
            if tries > 1:  # what an earlier try left is in nobody's manifest
                for suffix in ("bin", "json"):
                    self.storage.delete(f"{self._folder(step)}/{shards.stem(self.assignment.rank)}.{suffix}")
            try:
                return write()
            except OSError as error:
                if tries == 1:
                    self.report(reports.SaveDelayed(step, self.assignment.rank, _told(error)))
                raise

        try:
            record = self.retry.run(once, self._hurry)
        except Exception as error:
            self.report(self._failed(step, error))
            return
        self.report(self._saved(step, record, header, stall))

    def _folder(self, step: int) -> str:
        return manifest.folder(step, self.assignment.attempt, self.assignment.token)

    def _saved(self, step: int, record: ShardRecord, header: dict[str, Any], stall: float) -> reports.ShardSaved:
        rank = self.assignment.rank
        return reports.ShardSaved(step, rank, record.index, record.digest, record.nbytes, header, stall)

    def _failed(self, step: int, error: Exception) -> reports.SaveFailed:
        return reports.SaveFailed(step, self.assignment.rank, _told(error))

    def _forgotten(self, step: int, error: Exception) -> reports.SnapshotFailed:
        return reports.SnapshotFailed(step, self.assignment.rank, _told(error))


def _settle(saving: Future[None], work: Callable[[], None]) -> None:
    """Do the work, and let `saving` say how it ended."""
    try:
        work()
    except BaseException as error:
        saving.set_exception(error)
    else:
        saving.set_result(None)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
