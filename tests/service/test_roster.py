from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from service import roster

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 10.0
OBEYS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("ended gently")))
print(flush=True)
time.sleep(60)
"""
IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-S', '-c', {IGNORES!r}]); c.wait()"

Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python processes that are ready when they are returned; what is left of them is ended after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def row(process: subprocess.Popen[bytes], off: float = 0.0) -> dict[str, Any]:
    return {"pid": process.pid, "started": psutil.Process(process.pid).create_time() + off}


def write(home: Path, *rows: dict[str, Any], temp: str = "") -> None:
    (home / roster.STATE).write_text(json.dumps({"temp": temp, "processes": rows}))


def said(process: subprocess.Popen[bytes]) -> bytes:
    """What it wrote until its end, after the line by which it was ready."""
    assert process.stdout is not None
    return process.stdout.read()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def pids(home: Path) -> list[int]:
    return [process.pid for process in roster.running(home)]


@pytest.mark.parametrize("content", [None, "", "{", '{"temp": "/tmp/x", "proc'])
def test_without_a_readable_record_nothing_runs(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / roster.STATE).write_text(content)
    assert roster.running(tmp_path) == []
    assert roster.down(tmp_path) == 0


def test_a_home_that_does_not_exist(tmp_path: Path) -> None:
    assert roster.running(tmp_path / "none") == []
    assert roster.down(tmp_path / "none") == 0


def test_running_are_those_alive_the_starter_first(tmp_path: Path, start: Start) -> None:
    starter, dead, member = start(OBEYS), start("print()"), start(OBEYS)
    rows = [row(starter), row(dead), row(member)]
    dead.wait(DEADLINE_S)
    write(tmp_path, *rows)
    assert pids(tmp_path) == [starter.pid, member.pid]


def test_a_zombie_is_not_alive(tmp_path: Path, start: Start) -> None:
    member = start("print()")
    write(tmp_path, row(member))
    os.waitid(os.P_PID, member.pid, os.WEXITED | os.WNOWAIT)
    assert pids(tmp_path) == []


@pytest.mark.parametrize(("off", "found"), [(0.0, True), (0.5, True), (-60.0, False), (3600.0, False)])
def test_a_pid_that_is_used_again_is_not_ours(tmp_path: Path, start: Start, off: float, found: bool) -> None:
    process = start(OBEYS)
    write(tmp_path, row(process, off))
    assert pids(tmp_path) == ([process.pid] if found else [])
    assert roster.down(tmp_path) == int(found)
    assert gone(process.pid) == found


def test_down_ends_the_starter_gently_and_the_rest_for_sure(tmp_path: Path, start: Start) -> None:
    starter, stubborn, parent = start(OBEYS), start(IGNORES), start(PARENT)
    (child,) = psutil.Process(parent.pid).children()
    temp = tmp_path / "phx-temp"
    temp.mkdir()
    (tmp_path / "api.json").write_text("{}")
    write(tmp_path, row(starter), row(stubborn), row(parent), temp=str(temp))
    assert roster.down(tmp_path) == 3
    assert said(starter) == b"ended gently\n"
    assert gone(stubborn.pid)
    assert gone(parent.pid)
    assert gone(child.pid)
    assert list(tmp_path.iterdir()) == []
    assert roster.down(tmp_path) == 0


def test_down_works_when_the_starter_was_killed(tmp_path: Path, start: Start) -> None:
    starter, member = start(OBEYS), start(OBEYS)
    write(tmp_path, row(starter), row(member))
    starter.kill()
    starter.wait(DEADLINE_S)
    assert roster.down(tmp_path) == 1
    assert gone(member.pid)
    assert not (tmp_path / roster.STATE).exists()


def test_a_recorded_fleet_is_its_starter_and_all_below(tmp_path: Path, start: Start) -> None:
    starter = start(
        f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, *{sys.path!r}]
import pathlib, subprocess, time
from service import roster
child = subprocess.Popen([sys.executable, "-S", "-c", {OBEYS!r}], stdout=subprocess.DEVNULL)
roster.record(pathlib.Path({str(tmp_path)!r}), "")
print(flush=True)
child.wait()
"""
    )
    (child,) = psutil.Process(starter.pid).children()
    assert pids(tmp_path) == [starter.pid, child.pid]
    assert roster.down(tmp_path) == 2
    assert gone(starter.pid)
    assert gone(child.pid)
