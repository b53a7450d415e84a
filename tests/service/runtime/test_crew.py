from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from service.contracts.errors import ClusterError
from service.core.policy import Policy
from service.runtime import processes
from service.runtime.crew import Crew, Member
from service.runtime.health.fake import FakeNvml
from service.runtime.health.monitor import Monitor, Sources
from service.runtime.health.nvml import Reading

pytestmark = pytest.mark.ray

Processes = list["subprocess.Popen[bytes]"]


@pytest.fixture
def sleepers() -> Iterator[Processes]:
    made = [subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) for _ in range(3)]
    yield made
    for process in made:
        process.kill()
        process.wait()


@pytest.fixture
def lost() -> list[Member]:
    return []


@pytest.fixture
def crew(lost: list[Member], sleepers: Processes) -> Crew:
    """Two stand by on slot 0, one on slot 1."""
    made = Crew(lost.append)
    for slot, process in zip((0, 0, 1), sleepers, strict=True):
        made.enlist(slot, process.pid, f"actor {process.pid}")
    return made


def test_who_stood_by_first_is_put_to_work_and_the_next_one_stands_by(crew: Crew, sleepers: Processes) -> None:
    first = crew.standby(0)
    assert first is not None
    assert (first.pid, first.rank) == (sleepers[0].pid, None)
    crew.put(first.pid, 7)
    assert {rank: member.pid for rank, member in crew.at_work().items()} == {7: sleepers[0].pid}
    second = crew.standby(0)
    assert second is not None
    assert second.pid == sleepers[1].pid
    assert crew.standby(2) is None


def test_those_at_work_are_ended_and_those_who_stand_by_are_not(
    crew: Crew, sleepers: Processes, lost: list[Member]
) -> None:
    crew.put(sleepers[0].pid, 0)
    sleepers[0].send_signal(signal.SIGSTOP)
    assert crew.end(everyone=False) == []
    assert not psutil.pid_exists(sleepers[0].pid) or sleepers[0].wait(10) == -signal.SIGKILL
    crew.look(0.5)
    assert lost == []  # it was ended here
    assert crew.at_work() == {}
    assert crew.standby(0) is not None
    assert sleepers[1].poll() is sleepers[2].poll() is None


def test_who_is_gone_and_still_holds_a_device_has_not_ended(
    lost: list[Member], sleepers: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "KILL_S", 1.0)
    gpus = FakeNvml([[Reading(0)], [Reading(1)]])
    health = Monitor(Policy(()), Sources(gpus=gpus), lambda event: None)
    made = Crew(lost.append, health.holders)
    made.enlist(0, sleepers[0].pid, None)
    gpus.hold(1, sleepers[0].pid, 4711)
    assert made.end(everyone=False) == []  # it stands by, and holds what it likes
    made.put(sleepers[0].pid, 3)
    assert made.end(everyone=False) == [sleepers[0].pid]
    assert 3 in made.at_work()
    gpus.hold(1, 4711)
    assert made.end(everyone=False) == []
    assert sleepers[0].wait(10) == -signal.SIGKILL


def test_after_the_end_of_everyone_it_is_too_late_to_enlist(crew: Crew, sleepers: Processes) -> None:
    assert crew.end(everyone=True) == []
    assert [process.wait(10) for process in sleepers] == [-signal.SIGKILL] * 3
    with pytest.raises(ClusterError, match="has been stopped"):
        crew.enlist(0, 1, None)


@pytest.mark.parametrize("rank", [None, 5])
def test_who_ends_by_itself_is_told_with_its_rank(
    crew: Crew, sleepers: Processes, lost: list[Member], rank: int | None
) -> None:
    if rank is not None:
        crew.put(sleepers[2].pid, rank)
    sleepers[2].kill()
    sleepers[2].wait()
    crew.look(10.0)
    assert [(member.slot, member.rank) for member in lost] == [(1, rank)]
    assert crew.standby(1) is None


def test_a_process_that_is_gone_when_it_enlists_is_told_at_once(crew: Crew, lost: list[Member]) -> None:
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    crew.enlist(1, gone.pid, None)
    assert [member.pid for member in lost] == [gone.pid]
