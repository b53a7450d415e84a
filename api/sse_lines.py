"""Server-sent events from lines of text, as the HTML standard reads them. Knows no HTTP."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """`id` is the last one that the stream named, so it may be that of an earlier message."""

    id: str
    event: str
    data: str


def messages(lines: Iterable[str]) -> Iterator[Message]:
    """A message is given out at its blank line; what a cut stream left half is dropped."""
    last_id, event, data = "", "message", list[str]()
    for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield Message(last_id, event, "\n".join(data))
            event, data = "message", []
        elif name == "id":
            last_id = value
        elif name == "event":
            event = value
        elif name == "data":
            data.append(value)
