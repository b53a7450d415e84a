"""The fit itself, on points whose answer is known; what it gave on published runs is in `fitted.py`."""

import dataclasses

import pytest

from service.core.plan import fitted
from service.core.plan.stack import PRIOR, Rates
from tests.bench import planner_fit
from tests.bench.planner_fit import NAMES, Point


def point(family: str, true: float) -> Point:
    """A product alone, on a machine whose rate is `true`."""
    return Point(family, 1 / true, lambda rates: 1 / rates.gemm_hopper)


def test_solves_small_systems():
    assert planner_fit.solve([[4.0, 1.0], [1.0, 3.0]], [1.0, 2.0]) == pytest.approx([1 / 11, 7 / 11])


def fit(points: list[Point]) -> Rates:
    return planner_fit.rates(planner_fit.fit(points, [0.0] * len(NAMES), 3))


def test_without_rows_the_priors_stay():
    assert fit([]) == PRIOR


def test_many_families_outweigh_the_prior_and_one_does_not():
    true = 0.8 * PRIOR.gemm_hopper
    many = fit([point(f"source {number}", true) for number in range(200)]).gemm_hopper
    one = fit([point("source", true) for _ in range(200)]).gemm_hopper
    assert many == pytest.approx(true, rel=0.05)
    assert one > 1.1 * true  # rows of one source share its error
    assert many < one < PRIOR.gemm_hopper


def test_what_no_row_shows_stays_at_its_prior():
    found = fit([point("a", 0.5), point("b", 0.6)])
    assert dataclasses.replace(found, gemm_hopper=PRIOR.gemm_hopper) == PRIOR


def test_a_family_left_out_is_not_in_what_judges_it():
    for family, rates in fitted.WITHOUT.items():
        assert rates.keys() == fitted.ALL.keys() == set(NAMES), family
        assert rates != fitted.ALL


def test_the_written_file_is_read_back():
    text = planner_fit.written({"nic": 0.5}, {"a": {"nic": 0.25}})
    scope: dict[str, object] = {}
    exec(text, scope)
    assert (scope["ALL"], scope["WITHOUT"]) == ({"nic": 0.5}, {"a": {"nic": 0.25}})
