"""What may import what: the contracts of pyproject.toml, and what really is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.server

ROOT = Path(__file__).parent.parent
LIGHT = [
    "service.core.machine",
    "service.contracts.job",
    "service.sim.scenario",
    "workers.spec",
    "workers.reports",
    "workers.cursor",
    "workers.data.order",
    "workers.checkpoint.manifest",
    "workers.checkpoint.publisher",
]


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_the_contracts_between_folders_are_kept() -> None:
    done = python("import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))")
    assert done.returncode == 0, done.stdout + done.stderr


def test_neither_ray_nor_torch_is_loaded() -> None:
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, *sorted({"ray", "torch"} & set(sys.modules)))
"""
    done = python(code, *LIGHT)
    assert (done.stdout.splitlines(), done.stderr) == (LIGHT, "")
