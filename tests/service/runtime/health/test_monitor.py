from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from service import health_policy
from service.contracts.events import HealthFound
from service.core.policy import Finding
from service.runtime.health import monitor
from service.runtime.health.fake import FakeLog, FakeNvml
from service.runtime.health.monitor import Monitor, Sources
from service.runtime.health.nvml import Nvml, Reading, Unavailable

DEADLINE_S = 20.0


class World:
    """A node with two GPUs, a kernel log and a monitor that looks every 10 ms."""

    def __init__(self, folder: Path, readable: bool = True) -> None:
        self.nvml = FakeNvml([[Reading(0, recovery_action=0)], [Reading(1, recovery_action=0)]])
        for index in range(2):
            self.nvml.read(index)  # what changes from here on is the next reading
        self.log = FakeLog(folder / "kmsg")
        self.events = folder / "memory.events"
        self.events.write_text("oom_kill 0\n")
        self.told: queue.Queue[HealthFound] = queue.Queue()
        log_path = self.log.path if readable else folder / "none"
        self.sources = monitor.sources("n1", log_path, folder / "sys", lambda: self.nvml, self.events)
        self.monitor = Monitor(health_policy.read(), self.sources, self.told.put, period_s=0.01, settle_s=0.05)

    def next(self) -> HealthFound:
        return self.told.get(timeout=DEADLINE_S)

    def rest(self) -> list[str]:
        """Once the monitor has stopped: what it told besides, and would tell of what it has not looked at."""
        rest = self.monitor.decide(self.monitor.collect())
        return [found.action for found in rest] + [self.told.get().action for _ in range(self.told.qsize())]


@pytest.fixture
def node(tmp_path: Path) -> World:
    return World(tmp_path)


def watched(world: World, happens: Callable[[World], None]) -> tuple[str, tuple[int, ...]]:
    """The first that the monitor's own thread tells of what has happened."""
    happens(world)
    world.monitor.start()
    try:
        found = world.next()
    finally:
        world.monitor.stop()
    assert found.node == "n1"
    return found.action, found.devices


def storm(world: World) -> None:
    for _ in range(20):
        world.log.xid(0, 45)
    world.log.xid(0, 79, "GPU has fallen off the bus.")
    world.nvml.change(0, lost=True)
    for _ in range(100):
        world.log.xid(1, 45)


F10 = [
    ("48", lambda world: world.log.xid(0, 48), ("drain", (0,))),
    ("79", lambda world: world.log.xid(1, 79), ("reboot", (1,))),
    ("63", lambda world: world.log.xid(0, 63), ("reset", (0,))),
    ("94", lambda world: world.log.xid(0, 94), ("restart", (0,))),
    ("storm of 45 behind a 79", storm, ("reboot", (0,))),
]


@pytest.mark.parametrize(("happens", "action"), [row[1:] for row in F10], ids=[f"F10-{row[0]}" for row in F10])
def test_F10_a_fault_has_its_action_once(
    node: World, happens: Callable[[World], None], action: tuple[str, tuple[int, ...]]
) -> None:
    assert watched(node, happens) == action
    assert node.rest() == []


def test_what_happens_later_is_told_too(node: World) -> None:
    node.monitor.start()
    try:
        for code, action in ((94, "restart"), (48, "drain"), (79, "reboot")):
            node.log.xid(0, code)
            assert node.next().action == action
    finally:
        node.monitor.stop()
    assert node.rest() == []


def test_F10_74_twice_in_an_hour(node: World) -> None:
    at = time.time()
    moments = [[Finding("n1", 0, "xid", 74, at + late)] for late in (0.0, 0.1, 600.0, 601.0)]
    told = [[found.action for found in node.monitor.decide(moment)] for moment in moments]
    assert told == [["reset"], [], ["drain"], []]


def test_F10_what_NVML_tells_and_the_log_tells_is_one_storm(node: World) -> None:
    def happens(world: World) -> None:
        world.nvml.change(0, remap_pending=True)
        world.log.xid(0, 63)
        world.log.xid(0, 154, "GPU recovery action changed from 0x0 (None) to 0x0 (None)")

    assert watched(node, happens) == ("reset", (0,))
    assert node.rest() == []


def test_what_was_logged_before_is_ignored(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.log.xid(0, 79, at_s=1.0)
    assert watched(world, lambda world: world.log.xid(1, 94)) == ("restart", (1,))
    assert world.rest() == []


def test_states_that_lasted_before_count(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.nvml.change(1, remap_failed=True)
    assert watched(world, lambda world: None) == ("drain", (1,))


def test_without_the_log_xids_come_from_NVML(tmp_path: Path) -> None:
    world = World(tmp_path, readable=False)
    (why,) = world.sources.missing
    assert why.endswith("No such file or directory: Xids come from NVML's events, kills for memory are only counted")
    assert watched(world, lambda world: world.nvml.xid(1, 79)) == ("reboot", (1,))


def test_a_machine_without_GPUs_is_watched_without_them(tmp_path: Path) -> None:
    def connect() -> Nvml:
        raise Unavailable("nvidia-ml-py is not installed")

    log = FakeLog(tmp_path / "kmsg")
    sources = monitor.sources("n1", log.path, tmp_path, connect)
    assert sources.missing == ("GPUs are not watched: nvidia-ml-py is not installed",)
    assert sources.kernel is not None


def test_a_source_that_fails_blinds_no_other(node: World, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def look(self, at: float) -> list[Finding]:
            raise RuntimeError("out of order")

    sources = Sources(node.sources.kernel, None, (Broken(), *node.sources.others))
    node.monitor.sources = sources
    assert watched(node, lambda world: world.log.xid(0, 48)) == ("drain", (0,))
    assert caplog.text.count("Broken can't be read") == 1


def test_F11_a_kill_for_memory_is_found_by_its_pid(node: World) -> None:
    node.log.say("Out of memory: Killed process 4711 (python) total-vm:9876kB, anon-rss:2048kB, file-rss:0kB")
    node.log.xid(0, 48)
    kill = node.monitor.out_of_memory(4711)
    assert kill is not None
    assert (kill.pid, kill.anon_rss) == (4711, 2048 * 1024)
    assert node.monitor.out_of_memory(4712) is None
    assert watched(node, lambda world: None) == ("drain", (0,))  # nothing was lost by asking


def test_F11_a_kill_that_was_only_counted_is_named_once(tmp_path: Path) -> None:
    world = World(tmp_path, readable=False)
    assert world.monitor.out_of_memory(4711) is None
    world.events.write_text("oom_kill 1\n")
    kill = world.monitor.out_of_memory(4711)
    assert kill is not None
    assert (kill.pid, kill.anon_rss) == (4711, None)
    assert world.monitor.out_of_memory(4712) is None
