"""What is wanted of a run at work. Set from another thread, on each rank by itself; agreed on by all after a step."""

from __future__ import annotations

import threading


class Wishes:
    def __init__(self) -> None:
        self._pausing, self._saving = threading.Event(), threading.Event()

    def pause(self, durable: bool) -> None:
        """End after the step under way; `durable`: with its state in storage."""
        if durable:
            self._saving.set()  # first: who sees that it is to end sees how
        self._pausing.set()

    def save(self) -> None:
        """The state of the step under way is to be written to storage."""
        self._saving.set()

    def pausing(self) -> bool:
        return self._pausing.is_set()

    def saving(self) -> bool:
        return self._saving.is_set()

    def saved(self) -> None:
        """All ranks save now: what is heard of the same wish later is done."""
        self._saving.clear()
