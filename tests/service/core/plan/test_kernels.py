import dataclasses

import pytest

from service.core.plan import hardware, kernels
from service.core.plan.stack import PRIOR, STACKS

STACK = dataclasses.replace(
    STACKS["phalanx"], rates=dataclasses.replace(PRIOR, gemm_ampere=0.5, flash_ampere=0.5, memory=0.5, ramp=0.0)
)
A100 = hardware.GPUS["A100-80GB"]  # 312 TFLOP/s, 2.039 TB/s, 108 multiprocessors
DEVICE = kernels.device(A100, STACK)


def rate(m: float, n: float, k: float) -> float:
    """Share of the peak that a product reaches."""
    return 2 * m * n * k / (DEVICE.product_s(m, n, k) - kernels.START_S) / A100.peak


@pytest.mark.parametrize(
    ("m", "n", "share"),
    [
        (128 * 108, 256, 0.5),  # exactly one wave
        (128 * 108, 256 * 8, 0.5),
        (128 * 54, 256, 0.5 * 0.93),  # half a wave: half tiles fill one
        (128 * 109, 256, 0.5 * 0.93 * 218 / 324),  # one tile more: half tiles need three waves for two
    ],
)
def test_all_waves_take_as_long_as_full_ones(m, n, share):
    assert rate(m, n, 8192) == pytest.approx(share, rel=0.05)


def test_thin_products_are_bound_by_memory():
    seconds = DEVICE.product_s(16, 8192, 8192) - kernels.START_S
    assert seconds == pytest.approx(2 * (8192 * 8192 + 2 * 16 * 8192) / (A100.bandwidth / 2))


def test_flash_attention_counts_half_of_the_scores():
    forward, backward = DEVICE.attention_s(1, 32, 4096, 4096, (128, 128))
    assert forward == pytest.approx(32 * 4096 * 4096 * 256 / (A100.peak / 2))
    assert backward == pytest.approx(2.5 * forward)


def test_scores_that_are_kept_cost_memory_traffic():
    unfused = kernels.device(A100, dataclasses.replace(STACK, flash=False))
    forward, _ = unfused.attention_s(1, 32, 4096, 4096, (128, 128))
    assert forward > 13 * 32 * 4096 * 4096 / (A100.bandwidth / 2)
    odd, _ = unfused.attention_s(1, 32, 4096, 4096, (127, 127))
    assert odd > 2 * forward  # no tensor cores


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [("H100-80GB", "bf16", 989e12), ("H100-80GB", "fp8", 1979e12), ("A100-80GB", "fp8", 312e12)],
)
def test_precision_sets_the_peak(name, precision, peak):
    device = kernels.device(hardware.GPUS[name], STACK, precision)
    assert device.peak <= peak
    assert device.peak > 0.4 * peak
