"""The bench runs, both sides load what they saved, its last line can be read. What it measures is not judged here."""

from __future__ import annotations

import json
import statistics

import pytest

from tests.bench import checkpoint
from tests.bench.saving import OURS

pytestmark = pytest.mark.torch

FIGURES = (
    "save_ratio", "stall_ratio", "load_ratio", "reshard_ratio", "stall_fraction", "read_amplification", "rss_growth_mb",
)  # fmt: skip


def test_the_bench_on_tiny_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.main(["--json", "--size", "tiny", "--rounds", "1"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert [line.split(" ratio")[0].strip() for line in lines[:7]] == [
        "save", "stall", *(f"load in dp{dp} x tp{tp}" for dp, tp in (checkpoint.SAME, *checkpoint.OTHERS)),
    ]  # fmt: skip
    assert all(isinstance(found[name], float) for name in FIGURES)
    assert 0 < found["stall_fraction"] < 1
    assert found["read_amplification"] >= 1  # an index is read, too
    medians = {
        name: statistics.median(each["save_s"]) for name, each in found["seconds"].items() if "async" not in name
    }
    assert found["save_ratio"] == pytest.approx(medians.pop(OURS) / min(medians.values()), rel=0.05)
