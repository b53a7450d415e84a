"""The adapter to nvidia-ml-py against a small library in the driver's place: what it asks for is compiled here."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from service.runtime.health import nvml

ROOT = Path(__file__).parents[4]
STUB = Path(__file__).with_name("nvml_stub.c")
READ = """
from service.runtime.health import nvml
try:
    gpus = nvml.connect()
except nvml.Unavailable as why:
    print(why)
else:
    print(gpus.devices())
    for device in gpus.devices():
        print(gpus.read(device.index))
    print(sorted(gpus.pids(0)), sorted(gpus.pids(1)))
    print(gpus.xids(), gpus.xids())
"""
DEVICES = [
    "(Device(index=0, uuid='GPU-0', pci='00000000:3B:00.0'), Device(index=1, uuid='GPU-1', pci='00000000:3C:00.0'))"
]
WORN = nvml.Reading(
    0, recovery_action=4, ecc_volatile=2, ecc_aggregate=7, remap_pending=True, remap_failed=False,
    links=(nvml.Link(0, True, 1 + 2 + 3), nvml.Link(1, False, None)), pcie_width=8, pcie_width_max=16,
    slowdowns=frozenset({"hw_thermal"}),
)  # fmt: skip
PLAIN = nvml.Reading(
    1, recovery_action=0, remap_pending=True, remap_failed=False, pcie_width=8, pcie_width_max=16
)  # fmt: skip
REST = ["[4711] []", "[XidEvent(index=1, xid=79), XidEvent(index=1, xid=45)] []"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pynvml")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(target), str(STUB)], check=True, timeout=60)
    return folder


def asked(library: Path, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", READ], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={**os.environ, "LD_LIBRARY_PATH": str(library), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("second", "reading"),
    [
        ("0", PLAIN),
        ("15", nvml.Reading(1, lost=True)),
        ("16", nvml.Reading(1, recovery_action=1)),
        ("3", nvml.Reading(1, pcie_width=8, pcie_width_max=16)),
        ("999", nvml.Reading(1, pcie_width=8, pcie_width_max=16)),
    ],
    ids=["well", "lost", "reset required", "not supported", "unknown error"],
)
def test_what_the_driver_says_is_read(library: Path, second: str, reading: nvml.Reading) -> None:
    assert asked(library, STUB_SECOND=second) == [*DEVICES, repr(WORN), repr(reading), *REST]


def test_a_field_that_an_old_driver_lacks_is_not_zero(library: Path) -> None:
    old = dataclasses.replace(PLAIN, recovery_action=None)
    assert asked(library, STUB_OLD="1") == [*DEVICES, repr(WORN), repr(old), *REST]


def test_a_driver_without_GPUs_is_unavailable(library: Path) -> None:
    assert asked(library, STUB_NONE="1") == ["this node has no NVIDIA GPU"]


def test_a_machine_without_a_driver_is_unavailable(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    assert asked(tmp_path) == ["NVML does not start: NVML Shared Library Not Found"]


def test_without_nvidia_ml_py_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as the import finds it where it is not installed
    with pytest.raises(nvml.Unavailable, match="nvidia-ml-py is not installed"):
        nvml.connect()
