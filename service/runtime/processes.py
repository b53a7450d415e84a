"""Processes of one node by pid: noticing that one is gone, and ending them for sure. Knows no Ray and no ranks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

KILL_S = 10.0
CAP_SYS_NICE = 1 << 23


class Watch:
    """Tells which of the watched processes have ended; a pid that is used again can't fool it."""

    def __init__(self) -> None:
        self.poll = select.poll()
        self.descriptors: dict[int, int] = {}  # pidfd -> pid

    def add(self, pid: int) -> bool:
        """False when the process is gone already."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        self.descriptors[descriptor] = pid
        self.poll.register(descriptor, select.POLLIN)
        return True

    def ended(self, timeout_s: float) -> list[int]:
        """Pids that ended since the last call; waits up to the timeout for one."""
        return [self._forget(descriptor) for descriptor, _ in self.poll.poll(timeout_s * 1000)]

    def watched(self) -> frozenset[int]:
        """Pids of those that have not been told to have ended."""
        return frozenset(self.descriptors.copy().values())

    def close(self) -> None:
        """Watch none of them any more."""
        for descriptor in tuple(self.descriptors):
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> int:
        pid = self.descriptors.pop(descriptor)
        self.poll.unregister(descriptor)
        os.close(descriptor)
        return pid


def end(pids: Iterable[int], timeout_s: float = KILL_S) -> list[int]:
    """SIGKILL the processes and their children, also stopped ones. The pids that are still there after the timeout."""
    doomed: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            doomed += [process, *process.children(recursive=True)]
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while (left := [process for process in doomed if _alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [process.pid for process in left]


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def give_way(nice: int) -> bool:
    """Let others have the cores first, all threads of this process; 0: no more. False, and nothing is changed, where
    the way back would not be allowed."""
    if not int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16) & CAP_SYS_NICE:
        return False
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
    with contextlib.suppress(OSError):  # sessions are weighed against each other only where the kernel does so
        Path("/proc/self/autogroup").write_text(str(nice))
    return True


def interface_of(address: str) -> str | None:
    """The network interface of this node that has the IP literal; None where none says so, as for the loopback net."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return None
