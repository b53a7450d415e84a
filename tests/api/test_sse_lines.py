"""Server-sent events from lines."""

from __future__ import annotations

import pytest

from api import sse_lines
from api.sse_lines import Message


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("id: 1\ndata: a\n\n", [Message("1", "message", "a")]),
        ("data: a\ndata: b\n\n", [Message("", "message", "a\nb")]),
        (
            "id: 1\ndata: a\n\nevent: end\ndata: b\n\n",
            [Message("1", "message", "a"), Message("1", "end", "b")],
        ),
        (": alive\n\n", []),
        ("data:a: b\n\n", [Message("", "message", "a: b")]),
        ("id: 1\ndata: a\n\nid: 2\ndata: half", [Message("1", "message", "a")]),
        ("event: end\n\ndata: a\n\n", [Message("", "message", "a")]),
    ],
)
def test_messages(text: str, found: list[Message]) -> None:
    assert list(sse_lines.messages(text.split("\n"))) == found
