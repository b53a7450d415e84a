"""A probe of this machine: what is timed, at which sizes, and what can't be."""

from __future__ import annotations

import dataclasses
import itertools
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workers import calibrate
from workers.models.spec import ModelSpec
from workers.timings import Probe

pytestmark = pytest.mark.torch

SMALL = dataclasses.replace(calibrate.CPU, tokens=(4, 64), round_s=1e-4, slow_s=60.0, elements=2**16, copied=(4096,))
MODEL = ModelSpec(layers=1, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, seq_len=64)


def test_products_are_those_of_a_layer_forward_and_backward_at_growing_sizes() -> None:
    found = list(calibrate._products(SMALL, MODEL, "fp32"))
    sizes = [(one.m, one.n, one.k) for one in found]
    for n, k in ((64, 32), (32, 32), (96, 32), (32, 48), (16, 32), (32, 8), (24, 32), (32, 12)):  # whole, and tp 4
        for m in (4, 16, 64):
            assert {(m, n, k), (m, k, n), (n, k, m)} <= set(sizes), (m, n, k)
    assert {one.precision for one in found} == {"fp32"}


def test_a_size_that_takes_too_long_is_the_last() -> None:
    slow = dataclasses.replace(SMALL, slow_s=0.0)
    assert {min(one.m, one.n, one.k) for one in calibrate._products(slow, MODEL, "fp32")} == {4}
    assert [one.tokens for one in calibrate._attention(slow, MODEL, "fp32")] == [256]


def test_weights_that_are_too_large_are_halved() -> None:
    wide = MODEL.model_copy(update={"ffn_hidden": 2**20})
    weights = list(calibrate._weights(SMALL, wide))
    assert all(n * k <= SMALL.elements for n, k in weights)
    assert len(weights) == 8
    assert list(calibrate._products(SMALL, wide, "fp32"))


def test_seconds_are_of_one_run() -> None:
    """The clock ticks once a run, whatever the rounds are made of."""
    ticks = itertools.count()
    now = [0.0]

    def run() -> None:
        next(ticks)
        now[0] += 0.25

    bench = dataclasses.replace(SMALL, clock=lambda: now[0], round_s=1.0)
    assert bench.median_s(run) == 0.25
    assert next(ticks) == 1 + 1 + 4 * calibrate.ROUNDS


def test_a_probe_of_this_cpu_takes_seconds() -> None:
    """Of the processor, so that nothing else on the machine counts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "workers.calibrate", "--device", "cpu", "--json"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 30
    found = Probe.model_validate_json(done.stdout)
    assert found.device == "cpu"
    assert {one.precision for one in found.products} == {one.precision for one in found.attention} == {"fp32", "bf16"}
    assert len({one.bytes for one in found.all_reduces}) == len(found.all_reduces) > 1
    assert 1e9 < max(one.flops / one.seconds for one in found.products) < 1e13


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate.main(["--device", "gpu"]) == 2
    assert "there is no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "a mapping of fields that has a model"),
        ("model: {layers: 0}", "layers"),
        ("{", "expected"),
        (None, "No such file"),
    ],
)
def test_a_job_that_can_not_be_read_is_told(
    text: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "job.yaml").write_text(text)
    assert calibrate.main(["--device", "cpu", "--job", str(tmp_path / "job.yaml")]) == 2
    told = capsys.readouterr()
    assert says in told.err
    assert told.out == ""
