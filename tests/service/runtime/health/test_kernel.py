from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from service.runtime.health import kernel
from service.runtime.health.fake import FakeLog, FakeNvml, FakeRing, pci
from service.runtime.health.kernel import CgroupKills, Kernel, KernelLog, OutOfMemory, Record, Unreadable
from service.runtime.health.nvml import Reading

DEVICES = FakeNvml([[Reading(0)], [Reading(1)]]).devices()
KILLED = (
    "Killed process 4711 (python (x)) total-vm:9876kB, anon-rss:1024kB, file-rss:0kB, shmem-rss:0kB, UID:0 "
    "pgtables:100kB oom_score_adj:0"
)


@pytest.mark.parametrize(
    ("line", "record"),
    [
        ("4,1052,123456789,-;NVRM: hello; world", Record(1052, 123.456789, "NVRM: hello; world")),
        ("6,0,0,-,caller=T1;boot", Record(0, 0.0, "boot")),
        (" SUBSYSTEM=pci", None),
        ("", None),
        ("no record", None),
        ("4,x,1,-;message", None),
    ],
)
def test_a_line_is_a_record_or_none(line: str, record: Record | None) -> None:
    assert kernel.parse(line) == record


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:3b:00", (0, 0x3B, 0)),
        ("0000:3b:00.0", (0, 0x3B, 0)),
        ("00000000:3B:00.0", (0, 0x3B, 0)),
        ("0008:01:1f", (8, 1, 0x1F)),
    ],
)
def test_pci_addresses_of_any_form(text: str, address: tuple[int, ...]) -> None:
    assert kernel.address(text) == address


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus.", ("xid", 79, 0)),
        ("NVRM: Xid (PCI:0000:3C:00): 79, GPU has fallen off the bus.", ("xid", 79, 1)),
        ("NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 94, Contained: LTC (0x5,0x0)", ("xid", 94, 0)),
        ("NVRM: Xid (0000:3b:00): 31, Ch 0000000b, engmask 00000120", ("xid", 31, 0)),
        ("NVRM: Xid (PCI:0000:ff:00): 48", ("xid", 48, None)),
        (
            "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)",
            ("recovery_action", 2, 0),
        ),
        ("NVRM: Xid (PCI:0000:3b:00): 154, something new", ("xid", 154, 0)),
        ("NVRM: loading NVIDIA UNIX Open Kernel Module", None),
        ("python[5]: said Xid 79", None),
    ],
)
def test_a_line_of_the_driver_is_a_finding(
    tmp_path: Path, message: str, found: tuple[str, int, int | None] | None
) -> None:
    log = FakeLog(tmp_path / "kmsg")
    source = Kernel("n1", kernel.open_log(log.path), DEVICES)
    log.say(message)
    told = source.look(1000.0)
    assert [(f.source, f.code, f.device) for f in told] == ([found] if found else [])
    assert all(f.node == "n1" and abs(f.at - 1000.0) < 5 and not f.before_boot for f in told)
    assert all(f.message == message for f in told)


def test_what_was_logged_before_this_watch_is_old(tmp_path: Path) -> None:
    log = FakeLog(tmp_path / "kmsg")
    log.xid(0, 79, at_s=1.0)
    source = Kernel("n1", kernel.open_log(log.path), DEVICES)
    log.xid(1, 48)
    assert [(f.code, f.before_boot) for f in source.look(time.time())] == [(79, True), (48, False)]
    assert source.look(time.time()) == []


def test_a_line_that_is_half_written_waits_for_its_rest(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("4,1,1000000,-;NVRM: Xid (PCI:0000:3b")
    source = Kernel("n1", kernel.open_log(path), DEVICES, since_s=0.0)
    assert source.look(0.0) == []
    with path.open("a") as file:
        file.write(":00): 63, row\n")
    assert [f.code for f in source.look(0.0)] == [63]


def test_a_ring_that_was_overwritten_is_read_on() -> None:
    ring = FakeRing(4)
    log = KernelLog(ring.read)
    ring.say("one")
    assert [record.message for record in log.read()] == ["one"]
    for number in range(9):
        ring.say(f"n{number}")
    assert [record.message for record in log.read()] == ["n5", "n6", "n7", "n8"]
    assert log.overrun == 1


def test_a_descriptor_that_would_wait_gives_what_there_is() -> None:
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    log = KernelLog(lambda: os.read(ours, 8192))
    os.write(theirs, b"4,7,5,-;hello\n")
    assert log.read() == [Record(7, 5e-6, "hello")]
    assert log.read() == []
    os.close(ours), os.close(theirs)


def test_a_log_that_may_not_be_read_says_why(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(Unreadable, match=why):
            kernel.open_log(path)


@pytest.mark.parametrize("head", ["Out of memory: ", "Memory cgroup out of memory: "])
def test_F11_a_kill_for_memory_has_pid_and_size(tmp_path: Path, head: str) -> None:
    log = FakeLog(tmp_path / "kmsg")
    log.say(head + KILLED.replace("4711", "1"), at_s=1.0)
    source = Kernel("n1", kernel.open_log(log.path), ())
    log.say(head + KILLED)
    log.say("oom_reaper: reaped process 4711 (python), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB")
    assert source.look(1000.0) == []
    (kill,) = source.kills
    assert (kill.pid, kill.anon_rss, kill.name) == (4711, 1024 * 1024, "python (x)")
    assert abs(kill.at - 1000.0) < 5


def test_F11_kills_are_counted_where_the_log_cannot_be_read(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 4\noom 2\noom_kill 2\noom_group_kill 0\n")
    kills = CgroupKills(events)
    assert kills.look(1.0) == []
    events.write_text("low 0\nhigh 0\nmax 4\noom 4\noom_kill 4\noom_group_kill 1\n")
    assert kills.look(2.0) == [OutOfMemory(None, None, 2.0)] * 2
    assert kills.look(3.0) == []


@pytest.mark.parametrize(
    ("proc", "files", "found"),
    [
        ("0::/pod/c\n", ["pod/c/memory.events", "memory.events"], "pod/c/memory.events"),
        ("0::/\n", ["memory.events"], "memory.events"),
        ("0::/outside/c\n", ["memory.events"], "memory.events"),
        ("4:memory:/job\n1:cpu:/\n0::/\n", ["memory/job/memory.oom_control"], "memory/job/memory.oom_control"),
        ("0::/\n", [], None),
    ],
)
def test_the_own_cgroup_has_a_counter(tmp_path: Path, proc: str, files: list[str], found: str | None) -> None:
    (tmp_path / "cgroup").write_text(proc)
    for file in files:
        (tmp_path / "fs" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / file).touch()
    events = kernel.own_cgroup(tmp_path / "cgroup", tmp_path / "fs")
    assert events == (tmp_path / "fs" / found if found else None)


@pytest.mark.skipif(not os.access(kernel.KMSG, os.R_OK), reason="/dev/kmsg may not be read here")
def test_this_machines_log_has_the_form() -> None:
    records = kernel.open_log().read()
    assert records == sorted(records, key=lambda record: record.sequence)
    assert all(record.at_s < time.monotonic() + 60 for record in records)


def test_the_fake_log_writes_of_the_fakes_devices() -> None:
    assert [kernel.address(device.pci) for device in DEVICES] == [kernel.address(pci(0)), kernel.address(pci(1))]
