"""Durations as people read them."""

from __future__ import annotations

import pytest

from api.cli import tables


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-1.0, "0.0s"),
        (0.84, "0.8s"),
        (9.97, "10s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (3599.9, "1h00m"),
        (7800, "2h10m"),
        (90_000, "1d01h"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert tables.duration(seconds) == text
