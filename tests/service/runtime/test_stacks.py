from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.runtime import stacks
from service.runtime.stacks import Look

pytestmark = pytest.mark.ray

PROGRAM = """
import sys, threading, time
from pathlib import Path
from service.runtime import stacks

def spins():
    print("ready", flush=True)
    sum(range(10**12))  # the GIL is never given back

def sleeps():
    print("ready", flush=True)
    time.sleep(60)

stacks.answer_signals(Path(sys.argv[1]))
globals()[sys.argv[2]]()
"""

COLLECTIVE = """  File ".../torch/_ops.py", line 9 in f
  File ".../torch/distributed/_functional_collectives.py", line 3 in wait
"""
STEP = '  File ".../workers/engine.py", line 200 in step\n  File ".../workers/trainer.py", line 120 in run'
WAITS, WORKS = COLLECTIVE + STEP, STEP


@pytest.fixture
def process(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "0.stack"), request.param]
    made = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    assert made.stdout.readline() == "ready\n"
    yield made
    made.kill()
    made.wait()
    made.stdout.close()


@pytest.mark.parametrize(("process", "where"), [("spins", "in spins"), ("sleeps", "in sleeps")], indirect=["process"])
def test_a_process_says_where_it_stands_again_and_again(
    process: subprocess.Popen[str], where: str, tmp_path: Path
) -> None:
    for _ in range(2):
        found = stacks.look(3, "n1", process.pid, tmp_path / "0.stack")
        assert (found.rank, found.node) == (3, "n1")
        assert found.stack.count(where) == 1


@pytest.mark.parametrize("process", ["sleeps"], indirect=True)
def test_a_stopped_process_is_seen_to_be_stopped(process: subprocess.Popen[str], tmp_path: Path) -> None:
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while (found := stacks.look(0, "n0", process.pid, tmp_path / "0.stack")).state != "stopped":
        assert time.monotonic() < deadline
    assert found.stack == ""


def test_a_process_that_is_gone(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    assert stacks.look(0, "n0", process.pid, tmp_path / "0.stack") == Look(0, "n0", "gone", "")


def looks(*found: tuple[str, str]) -> list[Look]:
    return [Look(rank, f"n{rank}", state, stack) for rank, (state, stack) in enumerate(found)]


@pytest.mark.parametrize(
    ("found", "odd"),
    [
        (looks(("sleeping", WAITS), ("stopped", ""), ("sleeping", WAITS)), 1),
        (looks(("sleeping", WAITS), ("sleeping", WORKS), ("sleeping", WAITS)), 1),  # it sleeps, or left one out
        (looks(("sleeping", WAITS), ("running", WORKS), ("stopped", "")), 2),
        (looks(("sleeping", WAITS), ("sleeping", WAITS), ("disk-sleep", "")), 2),
        (looks(("sleeping", WAITS), ("sleeping", WAITS)), None),
        (looks(("running", WORKS), ("running", WORKS)), None),  # all compute: nobody is waited for
        (looks(("stopped", ""), ("stopped", "")), None),
        ([], None),
    ],
)
def test_who_the_others_wait_for(found: list[Look], odd: int | None) -> None:
    one = stacks.odd(found)
    assert (one.rank if one else None) == odd


def test_stacks_are_told_the_odd_one_first_and_equal_ones_together() -> None:
    found = looks(("sleeping", WAITS), ("stopped", ""), ("sleeping", WAITS), ("running", WORKS))
    told = stacks.text(found, found[1])
    heads = [line for line in told.splitlines() if line.startswith("rank")]
    assert heads == ["rank 1 on n1: stopped", "ranks 3: running", "ranks 0, 2: sleeping"]
    assert "(no answer)" in told
    assert told.count("in wait\n") == 1
