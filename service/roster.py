"""Who belongs to the local fleet of a home, written down so that another process can end it, by pid.

Loads no Ray. A pid alone proves nothing, since pids are used again: the time of its start is kept beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
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
    """The processes of the fleet that was started in `home`, of those that are alive; the starter first."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        rows = json.loads((home / STATE).read_text())["processes"]
        return [process for row in rows if (process := _same(row)) is not None]
    return []


def down(home: Path) -> int:
    """End the fleet of `home`, as its starter would. How many processes were there."""
    found = running(home)
    if not found:
        return 0
    temp = json.loads((home / STATE).read_text())["temp"]
    with contextlib.suppress(psutil.NoSuchProcess):
        found[0].terminate()
    psutil.wait_procs(found[:1], timeout=STOP_S)
    left = [process for process in found if process.is_running()]
    end([member for process in left for member in family(process.pid)])
    forget(home, temp)
    return len(found)


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
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=STOP_S)


def forget(home: Path, temp: str) -> None:
    """The fleet has ended: remove what it left."""
    for name in (STATE, "api.json"):
        (home / name).unlink(missing_ok=True)
    if temp:
        shutil.rmtree(temp, ignore_errors=True)
