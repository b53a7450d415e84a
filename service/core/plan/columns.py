"""Cells of a row of published runs, as text. Knows no column's meaning."""

from __future__ import annotations

import re
from collections.abc import Mapping

Row = Mapping[str, str]


class Skipped(Exception):
    """Why a row can't be estimated."""


def number(row: Row, column: str) -> float | None:
    text = (row.get(column) or "").strip()
    try:
        return float(text) if text else None
    except ValueError:
        return None


def whole(row: Row, column: str, default: int | None = None) -> int:
    value = number(row, column)
    if value is None:
        if default is None:
            raise Skipped(f"{column} is not given")
        return default
    return int(value)


def text(row: Row, *columns: str) -> str:
    """Of several columns, in one line."""
    return " ".join(row.get(column) or "" for column in columns)


def says(row: Row, pattern: str, *columns: str) -> bool:
    return bool(re.search(pattern, text(row, *columns), re.IGNORECASE))
