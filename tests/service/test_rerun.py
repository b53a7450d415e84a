"""What a job brings along is there when its steps are done again: variables and own code, which may print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.contracts.runtime import Runtime
from tests.service.runtime.test_environment import archive
from tests.workers import runs
from workers.stretch import Redone, Stretch

pytestmark = pytest.mark.torch

MODEL = """
import os
from workers.models.example import ParallelDecoder

class Mine(ParallelDecoder):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        print(f"built for {os.environ['TEAM']}", flush=True)
"""


def rerun(runtime: Runtime, stretch: Stretch, temp: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service.rerun", runtime.model_dump_json()]
    environment = os.environ | {"TMPDIR": str(temp)}
    return subprocess.run(
        command, input=stretch.model_dump_json(), env=environment, capture_output=True, text=True, timeout=120
    )


def test_own_code_and_variables_are_there_and_what_a_model_prints_is_no_step(tmp_path: Path) -> None:
    uri, digest = archive(tmp_path, mine__model=MODEL)
    run = runs.spec(layout={"dp": 2}, model={"family": "mine.model:Mine"})
    stretch = Stretch(run=run, job="run", root=str(tmp_path), begin=0, samples=(0, 12))
    runtime = Runtime(env={"TEAM": "vision"}, working_dir=uri, digest=digest, secrets={"KEY": "env:NOT_HERE"})
    done = rerun(runtime, stretch, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [Redone(**json.loads(line)).step for line in done.stdout.splitlines()] == [1, 2]
    assert done.stderr.count("built for vision") == 2
    other = rerun(runtime.model_copy(update={"digest": "0" * 64}), stretch, tmp_path)
    assert (other.returncode, other.stdout) == (2, "")
    assert "is not what it was when the job was submitted" in other.stderr
