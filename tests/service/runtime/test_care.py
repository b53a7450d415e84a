"""Nodes are asked for what the core holds against them: each once at a time, and what they answer is an event."""

from __future__ import annotations

import json
import queue
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from service.contracts import events
from service.contracts.cluster import Fleet, Node, NodeHealth
from service.core.state import Job, Placement, Slot, State
from service.runtime import care
from service.runtime.care import Care
from tests.e2e.world import until
from tests.service.core import world

GPU = Node("id0", "n0", 4, device="gpu")
CPU = Node("id1", "n1", 2)

Inbox = queue.SimpleQueue[Any]


class Asked:
    """Nodes that answer as they are told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Callable[..., str], tuple[int, ...]]] = []
        self.answer: str | Exception = ""
        self.going = threading.Event()
        self.going.set()

    def __call__(self, node: Node, task: Callable[..., str], devices: tuple[int, ...]) -> str:
        self.asked.append((node.name, task, devices))
        assert self.going.wait(10)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def inbox() -> Inbox:
    return queue.SimpleQueue()


@pytest.fixture
def carer(asked: Asked, inbox: Inbox) -> Iterator[Care]:
    made = Care(inbox, asked)
    yield made
    asked.going.set()
    made.close()


def state(jobs: tuple[Job, ...] = (), **health: NodeHealth) -> State:
    return State({job.uid: job for job in jobs}, Fleet((GPU, CPU)), health)


def idle(carer: Care) -> None:
    until(lambda: not carer.busy, "answer")


def test_a_probe_passes_or_not(carer: Care, asked: Asked, inbox: Inbox) -> None:
    carer.look(state(n1=NodeHealth(needs_probe=True)))
    passed = inbox.get(timeout=10)
    assert (passed.node, passed.passed) == ("n1", True)
    asked.answer = "cuda:1: memory: 3 words were not as they had been written"
    idle(carer)
    carer.look(state(n0=NodeHealth(needs_probe=True)))
    failed = inbox.get(timeout=10)
    assert (failed.node, failed.passed, failed.message) == ("n0", False, asked.answer)
    assert asked.asked == [("n1", care.probe, ()), ("n0", care.probe, (0, 1, 2, 3))]


def test_devices_are_reset_once_nobody_stands_on_them(carer: Care, asked: Asked, inbox: Inbox) -> None:
    waiting = NodeHealth(resets=(1, 2))
    job = Job("a", 1, world.spec(), 0.0, placement=Placement((Slot("id0", "n0", 2),)))
    carer.look(state((job,), n0=waiting))
    done = inbox.get(timeout=10)
    assert (done.node, done.devices) == ("n0", (1,))
    asked.answer = "In use by another client"
    idle(carer)
    carer.look(state(n0=waiting))
    failed = inbox.get(timeout=10)
    assert isinstance(failed, events.HealthFound)
    assert (failed.action, failed.devices) == ("reboot", (1, 2))
    assert asked.answer in failed.message


def test_one_thing_at_a_time_and_nothing_of_an_excluded_node(carer: Care, asked: Asked, inbox: Inbox) -> None:
    asked.going.clear()
    for _ in range(3):
        carer.look(state(n0=NodeHealth(needs_probe=True, resets=(1,)), n1=NodeHealth(needs_probe=True, excluded="bad")))
    asked.going.set()
    assert isinstance(inbox.get(timeout=10), events.DevicesReset)
    assert len(asked.asked) == 1


def test_a_node_that_dies_meanwhile_is_asked_again(carer: Care, asked: Asked, inbox: Inbox) -> None:
    asked.answer = ray.exceptions.NodeDiedError("gone")
    carer.look(state(n1=NodeHealth(needs_probe=True)))
    idle(carer)
    assert inbox.empty()
    asked.answer = ""
    carer.look(state(n1=NodeHealth(needs_probe=True)))
    assert inbox.get(timeout=10).passed


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi that writes down how it was called, and fails where there is a file `fails`."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
        f"if [ -e {tmp_path}/fails ]; then echo 'GPU 00000000:3B:00.0 is in use' >&2; exit 3; fi\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def test_a_reset_is_nvidias(smi: Path) -> None:
    assert care.reset((0, 3)) == ""
    assert (smi / "calls").read_text() == "--gpu-reset -i 0,3\n"
    (smi / "fails").touch()
    assert care.reset((0,)) == "GPU 00000000:3B:00.0 is in use (exit code 3)"


def test_without_nvidia_smi_the_reset_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "nvidia-smi" in care.reset((0,))


def test_what_a_probe_finds_is_told_device_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "cuda:0": ("", json.dumps({"findings": []})),
        "cuda:1": ("", json.dumps({"findings": [{"check": "gemm", "message": "off", "code": "wrong"}]})),
        "cuda:2": ("no CUDA (exit code 2)", ""),
    }
    monkeypatch.setattr(care, "_failed", lambda command, timeout_s: said[command[command.index("--device") + 1]])
    assert care.probe((0, 1, 2)) == "cuda:1: gemm: off; cuda:2: no CUDA (exit code 2)"


@pytest.mark.torch
def test_this_machines_cpu_is_probed() -> None:
    assert care.probe(()) == ""
