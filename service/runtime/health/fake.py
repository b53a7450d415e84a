"""A node's GPUs and kernel log without hardware: NVML that follows a script of states, a log file that grows, a ring
that overwrites what nobody read. For tests and drills.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.runtime.health.nvml import Device, Reading, XidEvent


class FakeNvml:
    """Nvml whose device i goes through the readings `script[i]`, one a call; the last one stays."""

    def __init__(self, script: Sequence[Sequence[Reading]]) -> None:
        self.now = [readings[0] for readings in script]
        self.ahead = [collections.deque(readings) for readings in script]
        self.holders: dict[int, set[int]] = {}
        self.events: collections.deque[XidEvent] | None = None
        self.answering = threading.Event()  # cleared: calls hang, as with a device that is dying
        self.answering.set()

    def devices(self) -> tuple[Device, ...]:
        return tuple(Device(index, f"GPU-{index}", pci(index)) for index in range(len(self.now)))

    def read(self, index: int) -> Reading:
        self.answering.wait()
        if self.ahead[index]:
            self.now[index] = self.ahead[index].popleft()
        return self.now[index]

    def pids(self, index: int) -> frozenset[int]:
        return frozenset(self.holders.get(index, ()))

    def xids(self) -> list[XidEvent]:
        events, self.events = self.events or (), collections.deque()
        return list(events)

    # What happens to it

    def change(self, index: int, **fields: Any) -> None:
        """One more reading: as the last one, but for these fields."""
        last = self.ahead[index][-1] if self.ahead[index] else self.now[index]
        self.ahead[index].append(dataclasses.replace(last, **fields))

    def hold(self, index: int, *pids: int) -> None:
        """These processes hold the device from now on, and no others."""
        self.holders[index] = set(pids)

    def xid(self, index: int | None, code: int) -> None:
        """An event, lost as long as nobody listens."""
        if self.events is not None:
            self.events.append(XidEvent(index, code))


class FakeLog:
    """A file of records like `/dev/kmsg`'s."""

    def __init__(self, path: Path) -> None:
        self.path, self.sequence = path, 0
        path.touch()

    def say(self, message: str, at_s: float | None = None) -> None:
        """One record; `at_s` of the monotonic clock, now without it."""
        self.sequence += 1
        with self.path.open("a") as file:
            file.write(record(self.sequence, message, at_s))

    def xid(self, index: int, code: int, text: str = "pid=4711, name=python", at_s: float | None = None) -> None:
        """What the driver writes about device `index` of a FakeNvml."""
        self.say(f"NVRM: Xid (PCI:{pci(index).removesuffix('.0')}): {code}, {text}", at_s)


class FakeRing:
    """The last `capacity` records; `read` gives one, as `/dev/kmsg` does, and fails once where some are gone."""

    def __init__(self, capacity: int) -> None:
        self.records: collections.deque[tuple[int, str]] = collections.deque(maxlen=capacity)
        self.written, self.wanted = 0, 0

    def say(self, message: str) -> None:
        self.records.append((self.written, record(self.written, message)))
        self.written += 1

    def read(self) -> bytes:
        if self.wanted >= self.written:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        oldest = self.records[0][0]
        if self.wanted < oldest:
            self.wanted = oldest
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        text = self.records[self.wanted - oldest][1]
        self.wanted += 1
        return text.encode()


def record(sequence: int, message: str, at_s: float | None = None) -> str:
    at_s = time.monotonic() if at_s is None else at_s
    return f"4,{sequence},{int(at_s * 1e6)},-;{message}\n SUBSYSTEM=pci\n DEVICE=+pci:{pci(0)}\n"


def pci(index: int) -> str:
    return f"0000:{0x3B + index:02x}:00.0"
