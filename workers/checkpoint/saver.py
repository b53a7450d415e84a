"""Saves a rank's state while it trains on: copies in the caller's thread, writes in another.

Knows shards and this rank's assignment; not who assembles and publishes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from workers import reports
from workers.checkpoint import logical, manifest, shards
from workers.checkpoint.shards import Piece
from workers.checkpoint.storage import Storage
from workers.spec import Assignment


class Saver:
    """`save` blocks its thread for the copy only (and for a save before that is not written yet).

    Every save ends in one report, ShardSaved or SaveFailed, made in the writing thread; a failed save is an
    event and no exception. What does raise, from the next `save` or `close`, is a `report` that failed.
    """

    def __init__(self, storage: Storage, assignment: Assignment, report: Callable[[reports.Report], None]) -> None:
        self.storage = storage  # of the job
        self.assignment = assignment
        self.report = report
        self._copies: dict[str, tuple[Any, torch.Tensor]] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-write")
        self._last: Future[None] | None = None

    def save(
        self,
        step: int,
        state: logical.State,
        axes: logical.Axes,
        header: Mapping[str, Any],
        owner: bool | None = None,
    ) -> None:
        """Save this rank's pieces of `state` as they are now; `owner` as in `logical.pieces`."""
        began = time.perf_counter()
        self.wait()
        try:
            pieces = logical.pieces(state, axes, owner, self._hold)
            _finish_copies(state)
        except Exception as error:
            self.report(self._failed(step, error))
            return
        stall = time.perf_counter() - began
        self._last = self._writer.submit(self._write, step, pieces, dict(header), stall)

    def wait(self) -> None:
        """Until the save in flight, if any, was reported."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def _write(self, step: int, pieces: Sequence[Piece], header: dict[str, Any], stall: float) -> None:
        me = self.assignment
        try:
            folder = manifest.folder(step, me.attempt, me.token)
            record = shards.write(self.storage, folder, me.rank, pieces)
        except Exception as error:
            self.report(self._failed(step, error))
            return
        self.report(reports.ShardSaved(step, me.rank, record.index, record.digest, record.nbytes, header, stall))

    def _failed(self, step: int, error: Exception) -> reports.SaveFailed:
        return reports.SaveFailed(step, self.assignment.rank, f"{type(error).__name__}: {error}")

    def _hold(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """A copy in host memory. Its memory is used again by the next save of the same shape."""
        like = (local.shape, local.dtype, local.stride(), local.device)
        made_for, copy = self._copies.get(name, (None, None))
        if copy is None or made_for != like:
            copy = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self._copies[name] = like, copy
        return copy.copy_(local, non_blocking=True)


def _finish_copies(state: logical.State) -> None:
    """Copies from a device go on beside the thread until here."""
    if any(tensor.device.type != "cpu" for tensor in state.values()):
        torch.accelerator.synchronize()
