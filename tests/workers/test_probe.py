from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from workers import probe
from workers.probe import Found, Measured

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
SMALL = ["--size", "64", "--bytes", "4096"]


def spoilt(row: int, column: int, by: float) -> Any:
    """A device that gets one value wrong, every time."""

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = a @ b
        product[row, column] += by
        return product

    return multiply


class Flickering:
    """A device that gets one value wrong now and then."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.times += 1
        return spoilt(1, 1, 0.5 if self.times == 3 else 0.0)(a, b)


@pytest.mark.parametrize(
    ("size", "multiply", "wrong"),
    [
        (64, torch.matmul, ""),
        (300, torch.matmul, ""),
        (64, spoilt(63, 63, 0.1), "1 of 4096 values are off by more than 6.9e-05"),
        (64, spoilt(0, 5, float("nan")), "1 of 4096 values"),
        (512, spoilt(510, 0, 0.1), "1 of 131072 values"),
        (64, Flickering(), "the same product came out differently"),
    ],
    ids=["sound", "odd size", "a value off", "no number", "a row of those compared", "now and then"],
)
def test_a_product_is_compared_with_float64(size: int, multiply: Any, wrong: str) -> None:
    measured = probe.gemm(CPU, size, multiply=multiply)
    assert measured.wrong.startswith(wrong)
    assert bool(measured.wrong) == bool(wrong)
    assert measured.value > 0


def test_products_of_bf16_are_within_their_rounding() -> None:
    left, right = (torch.randn(256, 256, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(2))
    assert probe._wrong_rows(left, right, left @ right) == ""
    assert probe._wrong_rows(left, right, left @ right + 8).startswith("65536 of 65536 values")


@pytest.mark.parametrize("nbytes", [16, 1000, 1 << 20])
def test_memory_that_keeps_what_is_written(nbytes: int) -> None:
    measured = probe.memory(CPU, nbytes)
    assert measured.wrong == ""
    assert measured.value > 0


def test_memory_with_a_bit_that_sticks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CHUNK", 100)  # it lies in a later chunk

    def stuck(words: torch.Tensor) -> None:
        words[777] |= 1 << 20

    assert probe.memory(CPU, 8000, stuck).wrong == "1 of 2000 words were not as they had been written"


def test_the_two_patterns_have_every_bit_both_ways() -> None:
    plain, inverted = (probe._pattern(5, 100, way, CPU) for way in (False, True))
    assert torch.equal(plain ^ inverted, torch.full((100,), -1))
    assert torch.equal(plain[1:], probe._pattern(6, 99, False, CPU))


def test_two_processes_add_up() -> None:
    measured = probe.pair((CPU, CPU), 1 << 16, timeout_s=250.0)
    assert measured.wrong == ""
    assert measured.value > 0


def test_a_pair_that_does_not_come_is_no_hang() -> None:
    with pytest.raises(TimeoutError, match="did not get through"):
        probe.pair((CPU, CPU), 1 << 16, timeout_s=0.01)


def test_wrong_sums_are_counted() -> None:
    assert probe.unlike(torch.tensor([1, 2, 3]), torch.tensor([1, 5, 3])) == 1


EARLIER = {"checks": {"gemm": {"value": 5e14}, "memory": {"value": 2e12}}}


@pytest.mark.parametrize(
    ("name", "earlier", "floors"),
    [
        ("CPU", None, {}),
        ("NVIDIA H100 80GB HBM3", None, {"gemm": 0.4 * 989.4e12}),
        ("NVIDIA H100 80GB HBM3", EARLIER, {"gemm": 0.4 * 989.4e12, "memory": 0.7 * 2e12}),
        ("CPU", EARLIER, {"gemm": 0.7 * 5e14, "memory": 0.7 * 2e12}),
    ],
)
def test_floors_are_shares_of_what_is_known(name: str, earlier: Any, floors: dict[str, float]) -> None:
    assert probe.floors(name, earlier) == floors


@pytest.mark.parametrize(
    ("measured", "floor", "found"),
    [
        (Measured(10.0, 1.0), None, None),
        (Measured(10.0, 1.0), 10.0, None),
        (Measured(9.0, 1.0), 10.0, Found("gemm", "slow", 9.0, "9 FLOP/s, the floor is 10")),
        (Measured(9.0, 1.0, "bad"), 10.0, Found("gemm", "wrong", 9.0, "bad")),
    ],
)
def test_a_result_is_judged(measured: Measured, floor: float | None, found: Found | None) -> None:
    assert probe.judged("gemm", measured, floor) == found


def test_a_check_that_raises_is_a_finding() -> None:
    result = probe.probe(CPU, {}, {"gemm": "x", "pair": "x"}, nbytes=1 << 60)
    (found,) = result["findings"]
    assert (found["check"], found["code"], found["value"]) == ("memory", "failed", None)
    assert result["checks"] == {}


def test_the_command_prints_one_object() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workers.probe", "--device", "cpu", "--json", "--pair-s", "250", *SMALL],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert (result["device"], result["findings"], result["skipped"]) == ("cpu", [], {})
    assert list(result["checks"]) == ["gemm", "memory", "pair"]


def test_an_earlier_result_is_a_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"checks": {"gemm": {"value": 1e18}}}))
    code = probe.main(["--json", "--skip", "pair", "--earlier", str(earlier), *SMALL])
    result = json.loads(capsys.readouterr().out)
    assert code == 1
    assert result["checks"]["gemm"]["floor"] == pytest.approx(0.7e18)
    assert [(found["check"], found["code"]) for found in result["findings"]] == [("gemm", "slow")]
    assert result["skipped"] == {"pair": "not asked for"}


def test_it_also_prints_lines(capsys: pytest.CaptureFixture[str]) -> None:
    code = probe.main(["--skip", "pair", "--skip", "memory", "--floor", "gemm=1e18", *SMALL])
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert lines[0] == "cpu (CPU)"
    assert lines[-1].startswith("  gemm is slow: ")


@pytest.mark.parametrize("arguments", [["--device", "gpu"], ["--earlier", "/nowhere"]])
def test_what_cannot_be_asked(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main(arguments) == 2
    assert capsys.readouterr().err
