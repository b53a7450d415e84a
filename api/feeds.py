"""What can be followed: a job's events and its log, read on from a cursor. Blocking; knows no HTTP.

A cursor names the last thing that was seen. For events it is the event's id; for the log `{chunk}:{line}`,
lines counted from 1, so that a reader that was cut resumes without a gap and without a line twice.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, get_args

import fsspec.core

from api.views import EventView, Level, LogLine
from service.contracts import errors
from service.store.jobs import Store
from service.store.records import LogChunkRow

LEVELS: tuple[Level, ...] = get_args(Level)
WORDS: dict[str, Level] = {
    "TRACE": "debug", "DEBUG": "debug", "INFO": "info", "NOTICE": "info", "WARNING": "warning", "WARN": "warning",
    "ERROR": "error", "CRITICAL": "error", "FATAL": "error",
}  # fmt: skip
SAID = re.compile(rf"\b({'|'.join(WORDS)})\b")
ERROR = re.compile(r"([A-Za-z_][\w.]*\.)?[A-Z]\w*(Error|Exception|Interrupt)(:|$)")
HEAD = 100  # characters in which a line says its level

CHUNKS = 20  # read from storage at a time
NUMBER = r"[0-9]{1,18}"  # fits the store's integers
EVENT_CURSOR, LOG_CURSOR = f"^{NUMBER}$", f"^{NUMBER}:{NUMBER}$"


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """`items` with the cursor of each, `position` to read on from, `drained` when there was no more."""

    items: tuple[tuple[str, EventView | LogLine], ...]
    position: str
    drained: bool


Read = Callable[[str, int], Batch]
"""(cursor, limit) -> Batch."""


def events(store: Store, uid: str, types: Collection[str] = (), since: float = 0.0) -> Read:
    def read(cursor: str, limit: int) -> Batch:
        rows = store.events(uid, event_cursor(cursor), limit, types, since)
        items = tuple((str(row.id), EventView(**dataclasses.asdict(row))) for row in rows)
        return Batch(items, items[-1][0] if items else cursor, len(rows) < limit)

    return read


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """Which lines of a log are wanted."""

    attempt: int | None = None
    rank: int | None = None
    level: Level = "debug"  # and above
    since: float = 0.0  # Unix seconds

    def has(self, line: LogLine) -> bool:
        ranked = self.rank is None or line.rank in (self.rank, None)
        return ranked and line.at >= self.since and LEVELS.index(line.level) >= LEVELS.index(self.level)


def logs(store: Store, uid: str, folder: str, wanted: Lines) -> Read:
    """`folder`: the job's place in storage, which the chunks' paths are relative to."""

    def read(cursor: str, limit: int) -> Batch:
        chunk, skip = log_cursor(cursor)
        rows = store.log_chunks(uid, chunk - 1, wanted.attempt, CHUNKS, wanted.since)
        items: list[tuple[str, LogLine]] = []
        position = cursor
        for row in rows:
            for number, line in enumerate(_lines(folder, row), 1):
                if row.id == chunk and number <= skip:
                    continue
                position = f"{row.id}:{number}"
                if wanted.has(line):
                    items.append((position, line))
                if len(items) == limit:
                    return Batch(tuple(items), position, False)
            position = f"{row.id + 1}:0"  # done with: not fetched again at the next turn
        return Batch(tuple(items), position, len(rows) < CHUNKS)

    return read


def event_cursor(cursor: str) -> int:
    if re.fullmatch(NUMBER, cursor):
        return int(cursor)
    raise _bad(cursor, "the id of an event")


def log_cursor(cursor: str) -> tuple[int, int]:
    match = re.fullmatch(f"({NUMBER}):({NUMBER})", cursor)
    if match is None:
        raise _bad(cursor, "{chunk}:{line}")
    return int(match[1]), int(match[2])


def _bad(cursor: str, kind: str) -> errors.UserError:
    hint = f"take one from an answer ({kind})"
    return errors.UserError(f"after: {cursor!r} is not a cursor of this feed", hint=hint, field="after")


def _lines(folder: str, row: LogChunkRow) -> Iterator[LogLine]:
    filesystem, path = fsspec.core.url_to_fs(f"{folder}/{row.path}")
    try:
        content = filesystem.cat_file(path)
    except FileNotFoundError:
        yield _note(row, f"{row.lines} lines of {row.node} are no longer in storage ({row.path})")
        return
    for line in content.decode(errors="replace").removesuffix("\n").split("\n"):
        yield _line(row, line)


def _line(row: LogChunkRow, line: str) -> LogLine:
    try:
        value: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:  # a chunk that was cut short still shows what it has
        return _note(row, line)
    return LogLine(
        at=value["at"],
        attempt=value["attempt"],
        rank=value["rank"],
        node=value["node"],
        stream=value["stream"],
        text=value["text"],
        level=_level(value["stream"], value["text"]),
    )


def _level(stream: str, text: str) -> Level:
    """What the line says of itself, else by its stream."""
    if text.startswith(("Traceback ", "Fatal Python error")) or ERROR.match(text):
        return "error"
    if said := SAID.search(text[:HEAD]):
        return WORDS[said[1].upper()]
    return "warning" if stream == "err" else "info"


def _note(row: LogChunkRow, text: str) -> LogLine:
    return LogLine(at=row.at, attempt=row.attempt, rank=None, node=row.node, stream="err", text=text, level="warning")
