"""A job as a run of TensorBoard: event files in a folder named by its uid, and the cursor beside them.

A run that is taken up again begins a new file. It opens with a session's start at the step after the cursor, at which
TensorBoard drops what an earlier file has from there on: it is written again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from api.tracking import standing
from api.tracking.tracker import Batch, library, shared
from api.turns import Cursor
from service.contracts import errors
from service.contracts.status import JobView


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events = library("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._files = library("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._scalar = library("tensorboard.plugins.scalar.summary_v2", "tensorboard").scalar_pb
        self._text = library("tensorboard.plugins.text.summary_v2", "tensorboard").text_pb

    def begin(self, job: JobView) -> Cursor:
        self._run = self._folder / job.uid
        try:
            cursor = standing.read(self._run / "phalanx.json")
            self._writer = self._files.EventFileWriter(str(self._run))
        except OSError as error:
            raise errors.UserError(f"{self._run} can't be written: {error.strerror}") from None
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        fresh = cursor == Cursor()
        self._add(0 if fresh else cursor.step + 1, job.created_at, session_log=start)
        if fresh:
            self._add(0, job.created_at, summary=self._text("job", f"```yaml\n{yaml.safe_dump(shared(job.spec))}```"))
        return cursor

    def write(self, batch: Batch) -> None:
        for point in batch.points:
            for name, value in point.values.items():
                self._add(point.step, point.at, summary=self._scalar(name, value))
        for mark in batch.marks:
            self._add(mark.step, mark.at, summary=self._text(mark.title, mark.text))
        self._writer.flush()
        standing.write(self._run / "phalanx.json", batch.cursor)

    def end(self, job: JobView | None) -> None:
        self._writer.close()

    def _add(self, step: int, at: float, **what: Any) -> None:
        self._writer.add_event(self._events.Event(step=step, wall_time=at, **what))
