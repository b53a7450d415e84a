"""The network keeps apart what is to be apart, and nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos import net
from tests.chaos.net import CORE, Net

pytestmark = [pytest.mark.server, pytest.mark.skipif(bool(net.missing()), reason=net.missing() or "-")]

RACKS = {CORE: ["head"], "r0": ["h0", "h1"], "r1": ["h2"]}
PAIRS = {("h0", "h1"), ("h0", "h2"), ("h0", "head"), ("h1", "h2"), ("h1", "head"), ("h2", "head")}


@pytest.fixture(scope="module")
def made() -> Iterator[Net]:
    one = Net(RACKS)
    yield one
    one.remove()


def joined(there: Net, one: str, other: str) -> socket.socket | None:
    """A connection from `one` to `other`."""
    address = there.addresses[other]
    with there.inside(other):
        server = socket.create_server((address, 0))
    with server, there.inside(one):
        try:
            return socket.create_connection((address, server.getsockname()[1]), timeout=0.3)
        except OSError:
            return None


def reached(there: Net) -> set[tuple[str, str]]:
    found = {pair: joined(there, *pair) for pair in sorted(PAIRS)}
    for connection in found.values():
        if connection is not None:
            connection.close()
    return {pair for pair, connection in found.items() if connection is not None}


CUTS: tuple[tuple[str, Callable[[Net], None], Callable[[Net], None], set[tuple[str, str]]], ...] = (
    ("host", lambda n: n.cut("h0"), lambda n: n.heal("h0"), {("h0", "h1"), ("h0", "h2"), ("h0", "head")}),
    ("head", lambda n: n.cut("head"), lambda n: n.heal("head"), {("h0", "head"), ("h1", "head"), ("h2", "head")}),
    ("rack", lambda n: n.partition("r0"), lambda n: n.rejoin("r0"),
     {("h0", "h2"), ("h0", "head"), ("h1", "h2"), ("h1", "head")}),
)  # fmt: skip


@pytest.mark.parametrize(("strike", "undo", "cut"), [row[1:] for row in CUTS], ids=[row[0] for row in CUTS])
def test_what_is_cut_and_what_is_not(
    made: Net, strike: Callable[[Net], None], undo: Callable[[Net], None], cut: set[tuple[str, str]]
) -> None:
    whole(made)
    strike(made)
    assert reached(made) == PAIRS - cut
    undo(made)
    whole(made)


def whole(there: Net) -> None:
    """Also just after a cut, when addresses are looked up anew."""
    deadline = time.monotonic() + 5
    while reached(there) != PAIRS:
        assert time.monotonic() < deadline


def test_this_machine_is_not_part_of_it(made: Net) -> None:
    with made.inside("h0"):
        server = socket.create_server((made.addresses["h0"], 0))
    server.settimeout(0.3)
    with server:
        with contextlib.suppress(OSError):
            socket.create_connection(server.getsockname(), timeout=0.2).close()
        with pytest.raises(TimeoutError):
            server.accept()
    assert {name for _, name in socket.if_nameindex()}.isdisjoint({*made.addresses, *made.racks})


def sent_s(there: Net, megabytes: int) -> float:
    """Seconds for so much from h0 to h1."""
    address = there.addresses["h1"]
    with there.inside("h1"):
        server = socket.create_server((address, 0))
    with server, there.inside("h0"), socket.create_connection(server.getsockname()) as out:
        heard, _ = server.accept()
        began, left = time.monotonic(), megabytes << 20
        pid = os.fork()
        if pid == 0:
            out.sendall(bytes(left))
            os._exit(0)
        with heard:
            while left:
                left -= len(heard.recv(1 << 20))
        os.waitpid(pid, 0)
        return time.monotonic() - began


def test_a_slow_host(made: Net) -> None:
    quick = sent_s(made, 1)
    made.slow("h0", 20)
    slow = sent_s(made, 1)
    made.even("h0")
    assert quick < 0.2 < 0.3 < slow < 2  # 8.4 Mbit at 20 Mbit/s
    assert sent_s(made, 1) < 0.2


def test_delay_where_the_kernel_has_it(made: Net) -> None:
    if not net.can_delay():
        pytest.skip("this kernel has no netem")
    made.delay("h0", 50)
    began = time.monotonic()
    connection = joined(made, "h0", "h1")
    took = time.monotonic() - began
    made.even("h0")
    assert connection is not None
    connection.close()
    assert took > 0.1


KILLED = """
import subprocess, sys, time
from tests.chaos.net import Net
net = Net({"r0": ["h0"]})
stray = subprocess.Popen(net.command("h0", "sleep", "600"))
print(net.name("h0"), stray.pid, flush=True)
time.sleep(600)
"""


def test_nothing_stays_also_after_a_crash() -> None:
    one = Net({"r0": ["h0"]})
    process = subprocess.Popen(one.command("h0", "sleep", "600"))
    while process.pid not in one.pids("h0"):
        time.sleep(0.01)
    one.remove()
    assert process.wait() == -signal.SIGKILL
    assert not list(net.NAMESPACES.glob(f"{one.prefix}*"))

    maker = subprocess.Popen((sys.executable, "-c", KILLED), stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    with maker.stdout:
        space, stray = maker.stdout.readline().split()
    while int(stray) not in net.pids(space):
        time.sleep(0.01)
    maker.kill()
    maker.wait()
    assert (net.NAMESPACES / space).exists()
    net.remove_leftovers()
    assert not (net.NAMESPACES / space).exists()
    assert not Path(f"/proc/{stray}/fd/0").exists()
