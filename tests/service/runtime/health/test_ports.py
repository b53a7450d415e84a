from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from service.runtime.health import ports
from service.runtime.health.ports import Port, Ports


def ethernet(root: Path, name: str, state: str = "up", downs: int = 0, errors: int = 0, real: bool = True) -> None:
    folder = root / "net" / name
    (folder / "statistics").mkdir(parents=True, exist_ok=True)
    (folder / "operstate").write_text(f"{state}\n")
    (folder / "carrier_down_count").write_text(f"{downs}\n")
    (folder / "statistics" / "rx_errors").write_text(f"{errors}\n")
    (folder / "statistics" / "tx_errors").write_text("0\n")
    if real:
        (folder / "device").mkdir(exist_ok=True)


def infiniband(root: Path, name: str, state: str = "4: ACTIVE", downs: int = 0, errors: int = 0) -> None:
    folder = root / "infiniband" / name / "ports" / "1"
    (folder / "counters").mkdir(parents=True, exist_ok=True)
    (folder / "state").write_text(f"{state}\n")
    (folder / "counters" / "link_downed").write_text(f"{downs}\n")
    (folder / "counters" / "symbol_error").write_text(f"{errors}\n")


def found(watch: Ports, at: float = 1.0) -> list[tuple[str, str, float]]:
    findings = watch.look(at)
    assert all((f.node, f.device, f.source, f.at) == ("n1", None, "port", at) for f in findings)
    return [(f.place, str(f.code), f.value) for f in findings]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    ethernet(tmp_path, "eth0")
    ethernet(tmp_path, "eth1", "down")
    ethernet(tmp_path, "lo", "unknown", real=False)
    infiniband(tmp_path, "mlx5_0")
    return tmp_path


def test_real_ports_are_read(root: Path) -> None:
    assert ports.read(root) == {
        "eth0": Port("eth0", True, 0, 0),
        "eth1": Port("eth1", False, 0, 0),
        "mlx5_0/1": Port("mlx5_0/1", True, 0, 0),
    }


def test_a_port_is_down_as_long_as_it_is(root: Path) -> None:
    watch = Ports("n1", root)
    assert found(watch) == []
    infiniband(root, "mlx5_0", "1: DOWN", downs=1)
    assert found(watch) == found(watch) == [("mlx5_0/1", "down", 0.0)]
    infiniband(root, "mlx5_0", downs=1)
    assert found(watch) == []


def test_a_port_that_was_down_between_two_looks_flapped(root: Path) -> None:
    watch = Ports("n1", root)
    infiniband(root, "mlx5_0", downs=2)
    ethernet(root, "eth0", downs=1)
    assert found(watch) == [("eth0", "flap", 1.0), ("mlx5_0/1", "flap", 2.0)]
    assert found(watch) == []


def test_errors_are_counted_between_looks(root: Path) -> None:
    infiniband(root, "mlx5_0", errors=1000)
    watch = Ports("n1", root)
    infiniband(root, "mlx5_0", errors=1250)
    ethernet(root, "eth0", errors=3)
    assert found(watch) == [("eth0", "errors", 3.0), ("mlx5_0/1", "errors", 250.0)]
    infiniband(root, "mlx5_0", errors=0)  # cleared
    assert found(watch) == []


def test_a_port_that_vanishes_is_down_and_one_that_comes_up_is_watched(root: Path) -> None:
    watch = Ports("n1", root)
    shutil.rmtree(root / "infiniband" / "mlx5_0")
    ethernet(root, "eth1", "up")
    assert found(watch) == [("mlx5_0/1", "down", 0.0)]
    ethernet(root, "eth1", "down")
    assert found(watch) == [("eth1", "down", 0.0), ("mlx5_0/1", "down", 0.0)]


def test_a_machine_without_any_has_none(tmp_path: Path) -> None:
    assert ports.read(tmp_path) == {}
    assert found(Ports("n1", tmp_path)) == []


def test_this_machines_ports_can_be_read() -> None:
    assert all(name == port.name for name, port in ports.read().items())
