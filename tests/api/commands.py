"""The command line, run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]
"""(words, given: standard input, environment) -> what typer's runner found."""


def submitted(run: Run, file: Path) -> str:
    done = run("submit", str(file))
    assert done.exit_code == 0, done.output
    return str(done.stdout.split()[1])
