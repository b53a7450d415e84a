from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from service.runtime import processes

DEADLINE_S = 10.0
SLEEP = "import time; time.sleep(60)"
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
print(child.pid, flush=True)
time.sleep(60)
"""

Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python processes; what is left of them is ended after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def watch() -> Iterator[processes.Watch]:
    made = processes.Watch()
    yield made
    made.close()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_end_is_noticed_within_a_second(watch: processes.Watch, start: Start, how: signal.Signals) -> None:
    first, second = start(SLEEP), start(SLEEP)
    assert watch.add(first.pid)
    assert watch.add(second.pid)
    assert watch.ended(0) == []
    began = time.monotonic()
    first.send_signal(how)
    assert watch.ended(DEADLINE_S) == [first.pid]
    assert time.monotonic() - began < 1.0
    assert watch.watched() == {second.pid}


def test_each_end_is_told_once(watch: processes.Watch, start: Start) -> None:
    members = [start(SLEEP) for _ in range(3)]
    for member in members:
        watch.add(member.pid)
        member.kill()
    told: list[int] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(told) < 3 and time.monotonic() < deadline:
        told += watch.ended(0.1)
    assert sorted(told) == sorted(member.pid for member in members)
    assert watch.ended(0) == []
    assert watch.watched() == frozenset()


def test_a_stopped_process_has_not_ended(watch: processes.Watch, start: Start) -> None:
    member = start(SLEEP)
    watch.add(member.pid)
    member.send_signal(signal.SIGSTOP)
    assert watch.ended(0.05) == []


def test_a_process_that_ended_before_its_parent_asked_is_told(watch: processes.Watch, start: Start) -> None:
    member = start("pass")
    os.waitid(os.P_PID, member.pid, os.WEXITED | os.WNOWAIT)
    assert watch.add(member.pid)
    assert watch.ended(DEADLINE_S) == [member.pid]


def test_a_process_that_is_gone_is_not_watched(watch: processes.Watch, start: Start) -> None:
    member = start("pass")
    member.wait(DEADLINE_S)
    assert not watch.add(member.pid)
    assert watch.watched() == frozenset()


def test_after_close_nothing_is_watched(watch: processes.Watch, start: Start) -> None:
    member = start(SLEEP)
    watch.add(member.pid)
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counts without opening more
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1  # noqa: PTH208
    member.kill()
    assert watch.ended(0) == []


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_and_its_children_are_ended(start: Start, stopped: bool) -> None:
    parent = start(PARENT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    if stopped:
        os.kill(child, signal.SIGSTOP)
        parent.send_signal(signal.SIGSTOP)
    assert processes.end([parent.pid], DEADLINE_S) == []
    assert gone(parent.pid)
    assert gone(child)


def test_several_are_ended_and_a_missing_one_is_no_matter(start: Start) -> None:
    over, *members = start("pass"), start(SLEEP), start(SLEEP)
    over.wait(DEADLINE_S)
    assert processes.end([over.pid, *(member.pid for member in members)]) == []
    assert [member.wait(DEADLINE_S) for member in members] == [-signal.SIGKILL] * 2


def test_nothing_to_end() -> None:
    assert processes.end([]) == []


def test_the_interface_of_an_address() -> None:
    assert processes.interface_of("127.0.0.1") == "lo"
    assert processes.interface_of("192.0.2.1") is None  # of documentation: no machine has it


GIVING_WAY = """
import os, sys, threading, time
from service.runtime import processes
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
for nice in (5, 0):
    done = processes.give_way(nice)
    print(done, *{os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}, flush=True)
"""


def test_a_process_gives_way_with_all_its_threads_and_comes_back() -> None:
    run = subprocess.run([sys.executable, "-c", GIVING_WAY], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() in (["True 5", "True 0"], ["False 0", "False 0"])
