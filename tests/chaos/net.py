"""A network of namespaces on one machine: hosts behind a bridge of their rack, and a bridge between the racks.

Knows `ip`, `tc` and which processes are in which namespace; nothing of what they do. Whatever is in the network's
namespaces was started there by its maker, and ends with it. Names carry the maker's pid: what a maker that was killed
left behind is removed when the next network is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PREFIX = "phx"
NAMESPACES = Path("/run/netns")
CORE = "core"  # the bridge between the racks; a host of no rack hangs there
GONE_S = 20.0

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Net:
    """`racks`: the hosts of each rack; those of rack `CORE` are in none. Names are of at most 12 characters."""

    made = 0

    def __init__(self, racks: Mapping[str, Sequence[str]]) -> None:
        remove_leftovers()
        Net.made += 1
        self.prefix = f"{PREFIX}-{os.getpid()}-{Net.made}"
        self.racks = {rack: tuple(hosts) for rack, hosts in racks.items()}
        self.addresses = {
            host: f"10.77.{number}.{place}"
            for number, hosts in enumerate(self.racks.values(), 1)
            for place, host in enumerate(hosts, 1)
        }
        try:
            self._make()
        except BaseException:
            self.remove()
            raise

    def _make(self) -> None:
        ip("netns", "add", self.name("fabric"))
        for bridge in {CORE, *self.racks}:
            self._fabric("link", "add", "name", bridge, "type", "bridge")
            self._fabric("link", "set", "dev", bridge, "up")
        for rack in self.racks.keys() - {CORE}:
            self._fabric("link", "add", "name", f"{rack}-up", "type", "veth", "peer", "name", f"{rack}-down")
            self._plug(f"{rack}-up", CORE)
            self._plug(f"{rack}-down", rack)
        for rack, hosts in self.racks.items():
            for host in hosts:
                self._add(host, rack)

    def _add(self, host: str, rack: str) -> None:
        own, space = ("-n", self.name(host)), self.name(host)
        ip("netns", "add", space)
        self._fabric("link", "add", "name", host, "type", "veth", "peer", "name", "eth0", "netns", space)
        self._plug(host, rack)
        ip(*own, "link", "set", "dev", "lo", "up")
        ip(*own, "address", "add", f"{self.addresses[host]}/16", "dev", "eth0")
        ip(*own, "link", "set", "dev", "eth0", "up")

    # What happens to a network

    def cut(self, host: str) -> None:
        """Its cable is pulled: packets are lost without a word."""
        self._fabric("link", "set", "dev", host, "down")

    def heal(self, host: str) -> None:
        self._fabric("link", "set", "dev", host, "up")

    def partition(self, rack: str) -> None:
        """Hosts of the rack reach each other and nobody else."""
        self._fabric("link", "set", "dev", f"{rack}-up", "down")

    def rejoin(self, rack: str) -> None:
        self._fabric("link", "set", "dev", f"{rack}-up", "up")

    @contextlib.contextmanager
    def few_ports(self, host: str, count: int = 128) -> Iterator[None]:
        """The system has so many ports left to give away on the host, and every other one of them is taken."""
        span = Path("/proc/sys/net/ipv4/ip_local_port_range")
        with contextlib.ExitStack() as taken:
            with self.inside(host):
                before, first = span.read_text(), 30000
                span.write_text(f"{first} {first + 2 * count - 1}")
                for port in range(first, first + 2 * count, 2):
                    with contextlib.suppress(OSError):  # somebody has it already
                        taken.enter_context(socket.create_server(("", port)))
            try:
                yield
            finally:
                with self.inside(host):
                    span.write_text(before)

    def slow(self, host: str, mbit: float) -> None:
        """So much bandwidth at most, in each direction."""
        self._shape(host, "tbf", "rate", f"{mbit}mbit", "burst", "32kb", "latency", "400ms")

    def delay(self, host: str, ms: float) -> None:
        """So much longer for every packet from the host and to it. Where `can_delay()`."""
        self._shape(host, "netem", "delay", f"{ms}ms")

    def even(self, host: str) -> None:
        """Neither slow nor delayed any more."""
        for space, device in self._ends(host):
            subprocess.run(("tc", "-n", space, "qdisc", "del", "dev", device, "root"), capture_output=True, check=False)

    # Processes

    def name(self, host: str) -> str:
        """Of its namespace."""
        return f"{self.prefix}-{host}"

    def command(self, host: str, *arguments: str) -> list[str]:
        """What runs `arguments` on the host, under the pid that it is started with."""
        return ["nsenter", f"--net={NAMESPACES / self.name(host)}", *arguments]

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Sockets that this thread opens meanwhile are the host's, for as long as they live."""
        with Path("/proc/thread-self/ns/net").open() as home, (NAMESPACES / self.name(host)).open() as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def pids(self, host: str) -> list[int]:
        """Of the processes on the host."""
        return pids(self.name(host))

    def end(self, host: str, spare: frozenset[int] = frozenset()) -> None:
        """SIGKILL to every process on the host but those to `spare`, until none is there."""
        end(self.name(host), spare)

    def remove(self) -> None:
        """All of it, with the processes in it; safe to repeat."""
        for name in (*self.addresses, "fabric"):
            _remove(self.name(name))

    def _fabric(self, *arguments: str) -> None:
        ip("-n", self.name("fabric"), *arguments)

    def _plug(self, device: str, bridge: str) -> None:
        self._fabric("link", "set", "dev", device, "master", bridge)
        self._fabric("link", "set", "dev", device, "up")

    def _ends(self, host: str) -> list[tuple[str, str]]:
        """(namespace, device) of both ends of its cable."""
        return [(self.name(host), "eth0"), (self.name("fabric"), host)]

    def _shape(self, host: str, *discipline: str) -> None:
        for space, device in self._ends(host):
            _run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *discipline)


@functools.cache
def missing() -> str:
    """Why no network can be made here; empty where one can."""
    if absent := [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]:
        return f"{' and '.join(absent)} of iproute2 and util-linux are not installed"
    try:
        Net({"r0": ["h0"]}).remove()
    except (subprocess.CalledProcessError, OSError) as error:
        return f"network namespaces can't be made here: {getattr(error, 'stderr', '') or error}".strip()
    return ""


@functools.cache
def can_delay() -> bool:
    """Whether the kernel has netem."""
    net = Net({CORE: ["h0"]})
    try:
        net.delay("h0", 1)
        return True
    except subprocess.CalledProcessError:
        return False
    finally:
        net.remove()


def pids(namespace: str) -> list[int]:
    told = subprocess.run(("ip", "netns", "pids", namespace), capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in told.split() if int(pid) != os.getpid()]


def end(namespace: str, spare: frozenset[int] = frozenset()) -> None:
    deadline = time.monotonic() + GONE_S
    while doomed := [pid for pid in pids(namespace) if pid not in spare]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {doomed} in {namespace} did not end by SIGKILL")
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove_leftovers() -> None:
    """What makers that are gone have left: processes, namespaces, file systems, folders."""
    for space in NAMESPACES.glob(f"{PREFIX}-*"):
        if _orphaned(space.name):
            _remove(space.name)
    for line in Path("/proc/mounts").read_text().splitlines():
        source, point, *_ = line.split()
        if _orphaned(source):
            subprocess.run(("umount", "-l", point), capture_output=True, check=False)
    for folders in (Path(tempfile.gettempdir()), Path("/dev/shm")):
        for folder in folders.glob(f"{PREFIX}-*-*"):
            if _orphaned(folder.name):
                shutil.rmtree(folder, ignore_errors=True)


def _orphaned(name: str) -> bool:
    """Its maker does not live any more."""
    found = re.match(rf"{PREFIX}-(\d+)-\d+(-|$)", name)
    return found is not None and not Path(f"/proc/{found[1]}").exists()


def _remove(namespace: str) -> None:
    if (NAMESPACES / namespace).exists():
        end(namespace)
        ip("netns", "del", namespace)


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
