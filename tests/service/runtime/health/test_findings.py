from __future__ import annotations

import pytest

from service.core.policy import Finding
from service.runtime.health import findings
from service.runtime.health.fake import FakeNvml
from service.runtime.health.findings import Devices, Events
from service.runtime.health.nvml import Link, Reading

GOOD = Reading(
    0, recovery_action=0, ecc_volatile=2, ecc_aggregate=7, remap_pending=False, remap_failed=False,
    links=(Link(0, True, 5), Link(1, True, 0), Link(2, False, 0)), pcie_width=16, pcie_width_max=16,
)  # fmt: skip


def changed(**fields: object) -> tuple[Reading, Reading]:
    nvml = FakeNvml([[GOOD]])
    nvml.change(0, **fields)
    return nvml.read(0), nvml.read(0)


TABLE = [
    ("nothing", {}, []),
    ("recovery action", {"recovery_action": 2}, [("recovery_action", 2, 2.0, "")]),
    ("uncorrected errors", {"ecc_volatile": 5, "ecc_aggregate": 10}, [("ecc", "volatile_uncorrected", 3.0, "")]),
    ("counter cleared", {"ecc_volatile": 0}, []),
    ("row to remap", {"remap_pending": True}, [("remap", "pending", 0.0, "")]),
    ("remap failed", {"remap_failed": True}, [("remap", "failed", 0.0, "")]),
    ("narrow bus", {"pcie_width": 8}, [("pcie", "width", 8.0, "")]),
    ("hot", {"slowdowns": frozenset({"hw_thermal", "sw_thermal"})},
     [("thermal", "hw_thermal", 0.0, ""), ("thermal", "sw_thermal", 0.0, "")]),
    ("link down", {"links": (Link(0, True, 5), Link(1, False, 0), Link(2, False, 0))},
     [("nvlink", "down", 0.0, "link 1")]),
    ("link errors", {"links": (Link(0, True, 9), Link(1, True, 0))}, [("nvlink", "errors", 4.0, "link 0")]),
    ("lost", {"lost": True}, [("pcie", "lost", 0.0, "")]),
    ("nothing is told", {"recovery_action": None, "ecc_volatile": None, "remap_pending": None, "pcie_width": None}, []),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "found"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_what_changed_is_found_once(fields: dict[str, object], found: list[tuple[object, ...]]) -> None:
    before, now = changed(**fields)
    told = findings.compare("n1", before, now, 3.0)
    assert [(f.source, f.code, f.value, f.place) for f in told] == found
    assert all((f.node, f.device, f.at, f.before_boot) == ("n1", 0, 3.0, False) for f in told)
    again = [f for f in findings.compare("n1", now, now, 4.0) if f.source != "thermal"]  # as long as it lasts
    assert again == []


def test_without_volatile_counters_the_aggregate_ones_are_read() -> None:
    before, now = Reading(0, ecc_aggregate=7), Reading(0, ecc_aggregate=9)
    assert [(f.code, f.value) for f in findings.compare("n1", before, now, 0.0)] == [("aggregate_uncorrected", 2.0)]


def test_the_first_reading_finds_states_and_no_counts() -> None:
    now = Reading(
        0, recovery_action=1, ecc_volatile=5, remap_pending=True, links=(Link(0, False, 9),), pcie_width=8,
        pcie_width_max=16,
    )  # fmt: skip
    found = findings.compare("n1", None, now, 0.0)
    assert [(f.source, f.code) for f in found] == [("recovery_action", 1), ("remap", "pending"), ("pcie", "width")]


def test_devices_are_read_now_and_then() -> None:
    nvml = FakeNvml([[GOOD], [GOOD]])
    devices = Devices("n1", nvml, every_s=10.0)
    assert devices.look(0.0) == []
    nvml.change(0, remap_pending=True)
    assert devices.look(9.0) == []
    assert [(f.source, f.device) for f in devices.look(10.0)] == [("remap", 0)]


def test_a_driver_that_does_not_answer_is_found_once_and_read_again_when_it_does() -> None:
    nvml = FakeNvml([[GOOD]])
    devices = Devices("n1", nvml, every_s=10.0, patience_s=0.01, silent_s=60.0)
    nvml.answering.clear()
    assert devices.look(0.0) == devices.look(59.0) == []
    assert [(f.code, f.device, f.value) for f in devices.look(61.0)] == [("silent", 0, 61.0)]
    assert devices.look(100.0) == []
    nvml.change(0, remap_pending=True)
    nvml.answering.set()
    devices.patience_s = 10.0
    assert devices.look(101.0) == []  # what was asked then
    assert [f.code for f in devices.look(102.0)] == ["pending"]


def test_an_error_of_the_driver_is_the_looks() -> None:
    class Broken(FakeNvml):
        def read(self, index: int) -> Reading:
            raise RuntimeError("no symbol")

    devices = Devices("n1", Broken([[GOOD]]), every_s=0.0)
    for at in (0.0, 1.0):
        with pytest.raises(RuntimeError, match="no symbol"):
            devices.look(at)


def test_xids_by_events_count_from_when_somebody_listens() -> None:
    nvml = FakeNvml([[GOOD], [GOOD]])
    nvml.xid(1, 48)
    events = Events("n1", nvml)
    nvml.xid(1, 79)
    assert events.look(5.0) == [Finding("n1", 1, "xid", 79, 5.0)]
    assert events.look(6.0) == []


def test_the_holders_of_a_device_are_told() -> None:
    nvml = FakeNvml([[GOOD]])
    assert nvml.pids(0) == frozenset()
    nvml.hold(0, 12, 13)
    assert nvml.pids(0) == {12, 13}


def test_a_probes_findings_are_findings() -> None:
    result = {"findings": [{"check": "gemm", "code": "slow", "value": 3.0, "message": "3 FLOP/s"}]}
    assert findings.probed("n1", 2, result, 1.0) == [
        Finding("n1", 2, "probe", "slow", 1.0, 3.0, message="3 FLOP/s", place="gemm")
    ]
