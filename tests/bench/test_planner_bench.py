"""The bench of the planner runs, and its last line has the figures that are promised."""

from __future__ import annotations

import json

import pytest

from tests.bench import planner


def test_a_short_run_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main(["--json", "--days", "0.5", "--trace-days", "3"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["search_16384_s"] < 2
    assert last["place_16384_s"] < 0.5
    assert last["simulate_16384_54d_s"] < 60
    assert last["goodput_16384_rates"] > 0.9
    if planner.TRACE.exists():
        assert 0.8 < last["baseline_2048_trace"] < last["goodput_2048_trace"] < 1
        assert last["goodput_2048_trace_cold"] <= last["goodput_2048_trace"]
