from __future__ import annotations

import pytest

from workers import hardware

DEVICES = [
    # name, TFLOP/s in bf16 and in fp32
    ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
    ("NVIDIA A100-PCIE-40GB", 312.0, 19.5),
    ("NVIDIA A100 80GB PCIe", 312.0, 19.5),
    ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
    ("NVIDIA H100 PCIe", 756.0, 51.0),
    ("NVIDIA H100 NVL", 835.0, 60.0),
    ("NVIDIA H200", 989.4, 66.9),
    ("NVIDIA H200 NVL", 835.0, 60.0),
    ("NVIDIA GH200 480GB", 989.4, 66.9),
    ("NVIDIA H800", 989.4, 66.9),
    ("NVIDIA H800 PCIe", 756.0, 51.0),
    ("NVIDIA B200", 2250.0, 75.0),
    ("NVIDIA GB200", 2500.0, 80.0),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
    ("Tesla T4", None, None),
    ("cpu", None, None),
]


@pytest.mark.parametrize(("name", "half", "single"), DEVICES)
def test_peaks(name: str, half: float | None, single: float | None) -> None:
    expected = [value if value is None else pytest.approx(value * 1e12) for value in (half, half, single)]
    assert [hardware.peak(name, precision) for precision in ("bf16", "fp16", "fp32")] == expected


def test_half_precision_is_the_fastest() -> None:
    for _, figures in hardware.PEAKS:
        assert figures is None or figures[0] > figures[1] >= figures[2]
