"""Who belongs to the local fleet of a home, written down so that another process can end it, by pid.

Loads no Ray. A pid alone proves nothing, since pids are used again: the time of its start is kept beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

STATE = "fleet.json"
STOP_S = 20.0


def record(home: Path, temp: str) -> None:
    """This process and all below it are the fleet of `home`, whose temporary folder is `temp`."""
    rows = [{"pid": process.pid, "started": process.create_time()} for process in family(os.getpid())]
    temporary = home / f".{STATE}"
    temporary.write_text(json.dumps({"temp": temp, "processes": rows}))
    temporary.replace(home / STATE)


def running(home: Path) -> list[psutil.Process]:
    """The processes of the fleet that was started in `home`, of those that are alive; its starter first."""
    return [process for row in _read(home)[1] if (process := _same(row)) is not None]


def down(home: Path) -> int:
    """End the fleet of `home`, as its starter would. How many processes were there."""
    temp, rows = _read(home)
    found = running(home)
    if found and (starter := _same(rows[0])) is not None:
        starter.terminate()
        _wait([starter])
    end([member for process in found if not _gone(process) for member in family(process.pid)])
    forget(home, temp)
    return len(found)


def _read(home: Path) -> tuple[str, list[Mapping[str, Any]]]:
    """(temporary folder, processes) as recorded; empty where nothing readable is."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        state = json.loads((home / STATE).read_text())
        rows: list[Mapping[str, Any]] = [
            {"pid": int(row["pid"]), "started": float(row["started"])} for row in state["processes"]
        ]
        return str(state["temp"]), rows
    return "", []


def memory(temp: str) -> str:
    """Where the nodes of the fleet with this temporary folder keep snapshots."""
    return f"/dev/shm/{Path(temp).name}" if sys.platform == "linux" else f"{temp}/snapshots"


def family(pid: int) -> list[psutil.Process]:
    """The process and all below it; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _same(row: Mapping[str, Any]) -> psutil.Process | None:
    try:
        process = psutil.Process(row["pid"])
        alive = abs(process.create_time() - row["started"]) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        return process if alive else None
    except psutil.NoSuchProcess:
        return None


def end(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL, and wait until they are gone."""
    doomed = list(processes)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait(doomed)


def _wait(processes: Iterable[psutil.Process]) -> None:
    deadline = time.monotonic() + STOP_S
    while not all(_gone(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def _gone(process: psutil.Process) -> bool:
    """Also one whose parent has not asked for its end yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def forget(home: Path, temp: str) -> None:
    """The fleet has ended: remove what it left."""
    for name in (STATE, "api.json"):
        (home / name).unlink(missing_ok=True)
    if temp.startswith(tempfile.gettempdir()):
        shutil.rmtree(temp, ignore_errors=True)
        shutil.rmtree(memory(temp), ignore_errors=True)
