"""The bench runs, both sides train the same, and its last line can be read. What it measures is not judged here."""

from __future__ import annotations

import json

import pytest

from tests.bench import trainer

pytestmark = pytest.mark.torch


def test_the_bench_on_tiny_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert trainer.main(["--json", "--size", "tiny", "--rounds", "1", "--warm", "1"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert [line.split()[0] for line in lines] == ["dp2", "tp2", "pp2", "2x2x2"]
    for layout in trainer.LAYOUTS:
        figures = found["layouts"][layout]
        assert found[f"ratio_{layout}"] == figures["ratio"] > 0
        assert figures["core_ratio"] == pytest.approx(figures["theirs_core_s"] / figures["ours_core_s"], rel=0.01)
