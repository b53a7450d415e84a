import dataclasses
import math

import pytest

from service.core.plan import fitted, hardware
from service.core.plan.stack import OWN, PRIOR, SPREAD, STACKS, Rates, fit

NAMES = [field.name for field in dataclasses.fields(Rates)]


@pytest.mark.parametrize("family", ["", *fitted.WITHOUT])
def test_fitted_rates_are_near_their_priors(family):
    """A rate that runs away from what micro-benchmarks show says that something else is wrong."""
    rates = fit(STACKS["phalanx"], family).rates
    for name in NAMES:
        ratio = math.log(getattr(rates, name) / getattr(PRIOR, name))
        assert abs(ratio) <= 2 * getattr(SPREAD, name), name


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("launch_s", "ramp", "scores")])
def test_shares_are_shares(name):
    assert 0 < getattr(OWN.rates, name) < 1


def test_a_family_that_nothing_was_fitted_on_gets_all():
    assert fit(STACKS["phalanx"], "a paper of tomorrow").rates == OWN.rates
    assert fit(STACKS["phalanx"], "dgxc-benchmarking").rates != OWN.rates


@pytest.mark.parametrize("gpu", hardware.GPUS.values(), ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("kind", ["gemm", "flash"])
def test_every_gpu_has_rates(gpu, kind):
    assert 0 < OWN.rate(kind, gpu.family) < 1
