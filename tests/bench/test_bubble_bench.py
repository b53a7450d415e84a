"""The bench runs, and what it measures is near theory."""

from __future__ import annotations

import json

import pytest

from tests.bench import bubble

pytestmark = pytest.mark.torch


def test_a_small_case_is_near_theory(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--schedules", "1f1b", "--micro-batches", "4"]
    assert bubble.main(["--json", *only, "--pass-s", "0.06", "--rounds", "6"]) == 0
    line, last = capsys.readouterr().out.splitlines()
    [case] = json.loads(last)["cases"]
    assert line.split()[0] == case["schedule"] == "1f1b"
    assert case["theory"] == pytest.approx(3 / 7, abs=1e-4)
    assert case["measured"] == pytest.approx(case["theory"], abs=0.1)  # 0.05 on a quiet machine, which this may not be
