"""The processes on the slots of one node: who stands by, who is at work as which rank. Knows no attempts, no reports.

A process that has enlisted is watched: it is ended for sure, and its end is noticed. One that is gone and still holds
a device, as the driver tells it, has not ended.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from service.contracts.errors import ClusterError
from service.runtime import processes

HELD_S = 0.02  # between looks whether a device is held


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """A process of one slot."""

    slot: int
    pid: int
    actor: Any
    rank: int | None = None  # None: it stands by


def nobody() -> frozenset[int]:
    return frozenset()


class Crew:
    """`lost` is told of members that ended and were not ended here. `holders`: pids that hold a device of this node."""

    def __init__(self, lost: Callable[[Member], None], holders: Callable[[], Collection[int]] = nobody) -> None:
        self.lost, self.holders = lost, holders
        self.lock = threading.Lock()
        self.members: dict[int, Member] = {}  # pid -> member
        self.watch = processes.Watch()
        self.closed = False

    def enlist(self, slot: int, pid: int, actor: Any) -> None:
        """A process is born. ClusterError once the crew is closed: it is too late."""
        with self.lock:
            if self.closed:
                raise ClusterError("the job has been stopped on this node")
            self.members[pid] = Member(slot, pid, actor)
        if not self.watch.add(pid):
            self._gone(pid)

    def standby(self, slot: int) -> Member | None:
        """The first to stand by on this slot."""
        with self.lock:
            return next((one for one in self.members.values() if one.slot == slot and one.rank is None), None)

    def put(self, pid: int, rank: int) -> None:
        """It is at work from here on."""
        with self.lock:
            self.members[pid] = dataclasses.replace(self.members[pid], rank=rank)

    def at_work(self) -> dict[int, Member]:
        """By rank."""
        with self.lock:
            return {one.rank: one for one in self.members.values() if one.rank is not None}

    def end(self, everyone: bool) -> list[int]:
        """End those at work, or everyone for good. The pids that would not go."""
        with self.lock:
            self.closed = self.closed or everyone
            doomed = {pid: one for pid, one in self.members.items() if everyone or one.rank is not None}
            for pid in doomed:
                del self.members[pid]
        deadline = time.monotonic() + processes.KILL_S
        left = set(processes.end(doomed))
        while (held := doomed.keys() & self.holders()) and time.monotonic() < deadline:
            time.sleep(HELD_S)
        left |= held
        with self.lock:
            self.members |= {pid: one for pid, one in doomed.items() if pid in left}
        return sorted(left)

    def look(self, timeout_s: float) -> None:
        """Notice who has ended; waits up to the timeout for one."""
        for pid in self.watch.ended(timeout_s):
            self._gone(pid)

    def _gone(self, pid: int) -> None:
        with self.lock:
            member = self.members.pop(pid, None)
        if member is not None:
            self.lost(member)
