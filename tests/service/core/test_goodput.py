from __future__ import annotations

import pytest

from service.core.goodput import goodput


@pytest.mark.parametrize(
    ("productive_s", "submitted_at", "end", "ratio"),
    [
        (50, 100, 200, 0.5),
        (0, 100, 200, 0),
        (100, 100, 200, 1),
        (101, 100, 200, 1),
        (5, 100, 100, 0),
        (5, 100, 99, 0),
    ],
)
def test_goodput(productive_s: float, submitted_at: float, end: float, ratio: float) -> None:
    assert goodput(productive_s, submitted_at, end) == ratio
