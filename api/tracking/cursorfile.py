"""Where a run stands, in a file beside what a tracker writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from api.turns import Cursor


def read(path: Path) -> Cursor:
    """From the start where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_text())
        return Cursor(int(found["event"]), int(found["step"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Cursor()


def write(path: Path, cursor: Cursor) -> None:
    """All of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(dataclasses.asdict(cursor)))
    new.replace(path)
