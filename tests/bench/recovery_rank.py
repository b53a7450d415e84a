"""One rank of `python -m workers`, which tells a trail what it trains. Started by torchrun or by Ray Train.

A trail is a file of JSON lines that outlives attempts: who each rank is, and what rank 0 printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench.recovery_fault import Done
from workers import __main__ as workers


def run(folder: Path, environment: Mapping[str, str], node: str) -> None:
    """Train the job of `folder`, from the newest checkpoint there."""
    trail, rank = folder / "trail", int(environment["RANK"])
    with trail.open("a", buffering=1) as out:
        out.write(json.dumps({"report": "Born", "rank": rank, "pid": os.getpid(), "node": node}) + "\n")
        with contextlib.redirect_stdout(out):
            code = workers.main([str(folder / "job.json"), "--root", str(folder / "runs")], environment)
    if code:
        raise RuntimeError(f"rank {rank} ended with {code}")


def told(folder: Path) -> list[dict[str, Any]]:
    """All lines that are whole."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in (folder / "trail").read_text().split("\n")[:-1]]
    return []


def steps(folder: Path) -> list[Done]:
    attempt, found = 0, []
    for line in told(folder):
        if line["report"] == "Resumed":
            attempt += 1
        elif line["report"] == "StepDone":
            found.append(Done(line["step"], attempt, line["at"]))
    return found


def newest(folder: Path, rank: int) -> tuple[int, str]:
    """Pid and node of a rank of the newest attempt."""
    lines = [line for line in told(folder) if line["report"] == "Born" and line["rank"] == rank]
    return lines[-1]["pid"], lines[-1]["node"]


if __name__ == "__main__":
    run(Path(sys.argv[1]), {**os.environ, "TORCHELASTIC_RESTART_COUNT": "0"}, os.environ["GROUP_RANK"])
