"""The bench runs on a CPU by the same code, and says nothing where there is no GPU. What it measures is not judged."""

from __future__ import annotations

import json

import pytest
import torch

from tests.bench import single_gpu

pytestmark = pytest.mark.torch

TINY = ["--json", "--size", "tiny", "--device", "cpu", "--rounds", "2", "--warm", "2"]


@pytest.mark.parametrize("options", [[], ["--micro-batch", "2"]], ids=["one", "two micro-batches"])
def test_the_bench_on_tiny_sizes(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    """It fails where the two don't train the same."""
    assert single_gpu.main(TINY + options) == 0
    ours, theirs, ratio, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in (ours, theirs, ratio)] == ["ours", "theirs", "ratio"]
    found = json.loads(last)
    assert found["measured"]
    for side in ("ours", "theirs"):
        assert found[side]["tokens_per_s"] > 0
        assert found[side]["mfu"] is None  # no CPU's peak is known
        assert found[side]["memory_gib"] is None
    assert found["ratio"] == pytest.approx(found["theirs"]["step_s"] / found["ours"]["step_s"], rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert single_gpu.main([]) == 0
    assert capsys.readouterr().out == "no GPU here: nothing measured\n"
    assert single_gpu.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"measured": False, "reason": "no GPU"}
