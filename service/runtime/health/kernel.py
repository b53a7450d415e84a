"""The kernel's log: records as `/dev/kmsg` gives them, and what two kinds of them say: Xids, and kills for memory.

A record is `priority,sequence,microseconds,flags;message`; lines that begin with a space say more about the one before.
A read never waits, gives whole records, and fails with EPIPE once where the ring has overwritten what was not read yet
(kernel.org/doc/Documentation/ABI/testing/dev-kmsg). Microseconds are of the monotonic clock. A file that grows is read
the same way. Where the log may not be read, `open_log` says so: Xids then come from NVML, and kills from the counter of
this process's own cgroup. Knows no policy.

The NVIDIA driver writes `NVRM: Xid (PCI:domain:bus:device): code, ...`; Xid 154 names the recovery action that it now
asks for, in the numbers of NVML's field (docs.nvidia.com/deploy/xid-errors). The kernel writes `Out of memory: Killed
process pid (name) ... anon-rss:nkB, ...` (mm/oom_kill.c), with the pid of the machine's own namespace.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from service.core.policy import Finding
from service.runtime.health.nvml import Device

KMSG = Path("/dev/kmsg")
RECORD_BYTES = 8192  # no record is longer
MOST_READS = 100_000  # of one look
KEPT_KILLS = 64

XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): (\d+)(?:,\s*(.*))?")
RECOVERY = re.compile(r"recovery action changed from 0x[0-9a-f]+ .*? to 0x([0-9a-f]+)", re.IGNORECASE)
KILL = re.compile(r"[Oo]ut of memory: Killed process (\d+) \((.*)\).*?anon-rss:(\d+)kB")
RECOVERY_XID = 154


class Unreadable(Exception):
    """The kernel's log may not be read here; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    sequence: int
    at_s: float  # of the monotonic clock
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The kernel ended a process since memory ran out. None: only that it did so, in this cgroup, is known."""

    pid: int | None
    anon_rss: int | None  # bytes of its own that it held
    at: float
    name: str = ""


class KernelLog:
    """Records since the last call. `read` gives bytes: none at the end, or BlockingIOError where it would wait."""

    def __init__(self, read: Callable[[], bytes]) -> None:
        self.next, self.rest, self.overrun = read, b"", 0

    def read(self) -> list[Record]:
        found = []
        for _ in range(MOST_READS):
            try:
                chunk = self.next()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EINVAL):  # overwritten before it was read, or too long
                    raise
                self.overrun += 1
                continue
            if not chunk:
                break
            *lines, self.rest = (self.rest + chunk).split(b"\n")
            found += [record for line in lines if (record := parse(line.decode(errors="replace")))]
        return found


def open_log(path: Path = KMSG) -> KernelLog:
    """Unreadable where it may not be read; the first records of a log are its oldest."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise Unreadable(f"{path} can't be read: {error.strerror}") from None
    return KernelLog(lambda: os.read(descriptor, RECORD_BYTES))


def parse(line: str) -> Record | None:
    """None for a line that says more about the record before, or that is no record."""
    head, found, message = line.partition(";")
    fields = head.split(",")
    if not found or len(fields) < 3 or not all(field.isdecimal() for field in fields[:3]):
        return None
    return Record(int(fields[1]), int(fields[2]) / 1e6, message)


def address(pci: str) -> tuple[int, ...]:
    """Domain, bus and device of a PCI address, whatever width it is written in and with or without a function."""
    return tuple(int(part, 16) for part in pci.partition(".")[0].split(":"))


class Kernel:
    """A source: what the log says of this node's GPUs, and of processes that the kernel ended for memory."""

    def __init__(self, node: str, records: KernelLog, devices: Iterable[Device], since_s: float | None = None) -> None:
        self.node, self.records = node, records
        self.indices = {address(device.pci): device.index for device in devices}
        self.since_s = time.monotonic() if since_s is None else since_s  # what is older was before this watch
        self.kills: list[OutOfMemory] = []

    def look(self, at: float) -> list[Finding]:
        found = []
        ago = at - time.monotonic()
        for record in self.records.read():
            if finding := self._xid(record, record.at_s + ago):
                found.append(finding)
            elif (killed := out_of_memory(record, record.at_s + ago)) and record.at_s >= self.since_s:
                self.kills = [*self.kills, killed][-KEPT_KILLS:]
        return found

    def _xid(self, record: Record, at: float) -> Finding | None:
        match = XID.search(record.message)
        if not match:
            return None
        device, old = self.indices.get(address(match[1])), record.at_s < self.since_s
        changed = RECOVERY.search(record.message)
        if int(match[2]) == RECOVERY_XID and changed:
            asked = int(changed[1], 16)
            return Finding(self.node, device, "recovery_action", asked, at, before_boot=old, message=record.message)
        return Finding(self.node, device, "xid", int(match[2]), at, before_boot=old, message=record.message)


def out_of_memory(record: Record, at: float) -> OutOfMemory | None:
    match = KILL.search(record.message)
    return OutOfMemory(int(match[1]), int(match[3]) * 1024, at, match[2]) if match else None


class CgroupKills:
    """Kills for memory in a cgroup, by its counter `oom_kill`: how many, not whom. `events` is its file."""

    def __init__(self, events: Path) -> None:
        self.events = events
        self.count = self._read()

    def look(self, at: float) -> list[OutOfMemory]:
        before, self.count = self.count, self._read()
        return [OutOfMemory(None, None, at)] * (self.count - before)

    def _read(self) -> int:
        try:
            lines = self.events.read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def own_cgroup(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """The file that counts the kills in this process's cgroup: version 2's, else version 1's; None without either."""
    try:
        rows = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in sorted(rows):  # version 2 has number 0
        inside = path.strip("/")
        files = {
            "": [root / inside / "memory.events", root / "memory.events"],
            "memory": [root / "memory" / inside / "memory.oom_control", root / "memory" / "memory.oom_control"],
        }
        for events in files.get(controllers, []):
            if events.is_file():
                return events
    return None
