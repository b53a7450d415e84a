"""What a node's agent has to say, kept until it is known to be in the store. Knows no Ray and no ranks.

Each word has a number, by which the other side tells what it has heard before, and belongs to an attempt. Of reports
of which only the newest counts, only the newest is kept.
"""

from __future__ import annotations

import threading
from typing import Any

from workers.reports import Moved, SnapshotTaken

Said = tuple[int, Any]  # (number, what was said)
NEWEST = (Moved, SnapshotTaken)
AT_ONCE = 5000  # words of one delivery: after an outage there may be many


class Outbox:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wake = threading.Event()  # something can't wait
        self.number = 0
        self.unsaid: dict[int, list[Said]] = {}  # attempt -> in order

    def say(self, attempt: int, what: Any, now: bool = True) -> None:
        with self.lock:
            waiting = self.unsaid.setdefault(attempt, [])
            if isinstance(what, NEWEST):
                waiting[:] = [(n, old) for n, old in waiting if type(old) is not type(what) or old.rank != what.rank]
            self.number += 1
            waiting.append((self.number, what))
        if now:
            self.wake.set()

    def waiting(self) -> list[tuple[int, list[Said]]]:
        """(attempt, the first of what is not confirmed of it), the oldest attempt first."""
        with self.lock:
            return [(attempt, said[:AT_ONCE]) for attempt, said in sorted(self.unsaid.items()) if said]

    def confirm(self, attempt: int, number: int) -> None:
        """All up to this number is known."""
        with self.lock:
            left = [(n, what) for n, what in self.unsaid.get(attempt, ()) if n > number]
            if left:
                self.unsaid[attempt] = left
            else:
                self.unsaid.pop(attempt, None)

    def of(self, attempt: int) -> tuple[Said, ...]:
        """What is not confirmed of an attempt."""
        with self.lock:
            return tuple(self.unsaid.get(attempt, ()))
