"""Processes that are to stay: one that ends is started again, after a wait that grows while it ends soon.

Knows what to run, not what it does. What they say goes to `{logs}/{name}.log`.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("phalanx.keeper")

CHECK_S = 0.1
WAIT_MAX_S = 30.0
SOUND_S = 60.0  # one that ran so long was well: its next end is the first again
END_S = 8.0


def wait_s(ends: int) -> float:
    """Seconds before the start after the `ends`-th end in a row; the first is at once."""
    return 0.0 if ends <= 1 else min(WAIT_MAX_S, 2.0 ** min(ends - 2, 10))


class Child:
    def __init__(self, name: str, arguments: tuple[str, ...], log: Path) -> None:
        self.name, self.arguments, self.log = name, arguments, log
        self.ends, self.due = 0, 0.0
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [sys.executable, *self.arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.started = time.monotonic()

    def tend(self) -> bool:
        """Notice its end, or start it when it is time; True when it was started."""
        now = time.monotonic()
        if self.process is None:
            if now < self.due:
                return False
            self.start()
            return True
        if (code := self.process.poll()) is not None:
            self.process = None
            self.ends = 1 if now - self.started >= SOUND_S else self.ends + 1
            self.due = now + wait_s(self.ends)
            log.warning("%s %s; it is started again in %.0f s", self.name, _how(code), wait_s(self.ends))
        return False


class Keeper:
    def __init__(self, logs: Path, restarted: Callable[[], None] = lambda: None) -> None:
        self.logs, self.restarted = logs, restarted
        self.children: dict[str, Child] = {}
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self, name: str, *arguments: str) -> None:
        """A Python process with these arguments, in a session of its own. Not tended before `keep`."""
        self.children[name] = Child(name, arguments, self.logs / f"{name}.log")

    def pid(self, name: str) -> int | None:
        """None while it waits to be started again."""
        process = self.children[name].process
        return process.pid if process is not None else None

    def ended(self) -> list[str]:
        """Names of those that have ended, before they are tended."""
        return [
            name for name, child in self.children.items() if child.process is None or child.process.poll() is not None
        ]

    def keep(self) -> None:
        """From here on, in a thread: start again what ends, and call `restarted`."""
        self.thread = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End all of them, gently first; safe to repeat."""
        self.over.set()
        if self.thread is not None:
            self.thread.join()
        alive = [child.process for child in self.children.values() if child.process is not None]
        for process in alive:
            process.terminate()
        deadline = time.monotonic() + END_S
        for process in alive:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.children = {}

    def _keep(self) -> None:
        while not self.over.wait(CHECK_S):
            for child in self.children.values():
                try:
                    if child.tend():
                        self.restarted()
                except OSError as error:  # no memory for a process, no space for its log: the next round may have
                    log.warning("%s could not be started: %s", child.name, error)


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
