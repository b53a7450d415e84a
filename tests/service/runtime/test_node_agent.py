"""Orders to a node's agent that overtake each other. Its ranks are plain processes here; nobody hears what it tells."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.contracts.errors import Fenced
from service.contracts.runtime import Runtime
from service.runtime.node_agent import NodeAgent


class Unheard(NodeAgent):
    def _report(self) -> None:
        pass


@pytest.fixture
def agent(tmp_path: Path) -> NodeAgent:
    (tmp_path / "kernel").touch()
    places = (str(tmp_path / "root"), str(tmp_path / "scratch"), str(tmp_path / "kernel"))
    return Unheard(1, "job", "h0", (0, 1), "nobody", "nowhere", *places, Runtime())


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_of_two_attempts_that_begin_the_newer_stays(agent: NodeAgent, rank: subprocess.Popen[bytes]) -> None:
    assert agent.begin(1, 2, (0, 1))
    agent.enlist(0, rank.pid, None)
    agent.crew.put(rank.pid, 0)
    assert agent.begin(1, 1, (0, 1))  # it was for standbys of the attempt before, and came late
    assert agent.standing(1).attempt == 2
    assert agent.standing(1).pids == {0: rank.pid}
    assert rank.poll() is None
    assert agent.begin(1, 3, (0, 1))
    assert agent.standing(1).attempt == 3
    assert rank.wait(10) == -signal.SIGKILL


def test_slots_that_it_does_not_hold_are_not_begun_on(agent: NodeAgent) -> None:
    assert not agent.begin(1, 2, (0, 2))
    assert agent.standing(1).attempt == 0


def test_an_older_controller_is_not_obeyed(agent: NodeAgent) -> None:
    assert agent.begin(4, 2, (0,))
    with pytest.raises(Fenced, match="another controller leads job job"):
        agent.begin(3, 3, (0,))
