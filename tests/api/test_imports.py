"""The API process and the command line load neither Ray nor torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.server


@pytest.mark.parametrize("module", ["api.app, api.serve", "api.cli.main"])
def test_neither_ray_nor_torch_is_loaded(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'ray', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
