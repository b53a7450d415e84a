"""Where a run stands, as text, and in a file beside what a tracker writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from api.turns import Cursor


def read(path: Path) -> Cursor:
    """From the start where there is none, or none that can be read."""
    try:
        return parsed(path.read_text())
    except (OSError, UnicodeDecodeError):
        return Cursor()


def parsed(text: str) -> Cursor:
    try:
        return Cursor(**{name: int(value) for name, value in json.loads(text).items()})
    except (ValueError, TypeError, AttributeError):
        return Cursor()


def text(cursor: Cursor) -> str:
    return json.dumps(dataclasses.asdict(cursor))


def write(path: Path, cursor: Cursor) -> None:
    """All of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(text(cursor))
    new.replace(path)
