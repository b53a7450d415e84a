from __future__ import annotations

from collections import Counter

import pytest

from service.contracts.errors import UserError
from service.sim import clock, faults
from service.sim.faults import Rate


@pytest.mark.parametrize(
    ("name", "mtbf_h"),
    # of a fleet of 2,048 nodes of 8: as the sources have it
    [
        ("llama3-405b", 3.09),
        ("rsc-1", 1000 * 24 / 6.5 / 2048),
        ("rsc-2", 1000 * 24 / 2.34 / 2048),
        ("infinitehbd", 2.80),
    ],
)
def test_the_rates_in_the_package_are_those_of_their_sources(name: str, mtbf_h: float) -> None:
    rates = faults.table(name)
    hourly = sum(rate.per_slot_hour * 16384 + rate.per_node_hour * 2048 for rate in rates)
    assert 1 / hourly == pytest.approx(mtbf_h, rel=0.01)


def test_every_rate_can_be_drawn_from() -> None:
    for name, rates in faults.tables().items():
        assert all(rate.per_slot_hour or rate.per_node_hour for rate in rates), name
        assert all((rate.kind == "node") == (rate.repair_h > 0) for rate in rates), name


def test_an_unknown_table_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        faults.table("moon")
    assert "llama3-405b" in caught.value.hint


def test_drawn_failures_come_at_their_rates() -> None:
    """10,000 and 5,000 are expected: four standard deviations are 4% and 6%. Of the nodes, one has half the slots."""
    rates = [Rate("by slot", "process", per_slot_hour=1 / 8), Rate("by node", "node", per_node_hour=1 / 4, repair_h=3)]
    found = faults.drawn(rates, [4, 2, 1, 1], 10_000 * clock.HOUR, 0)
    assert found == sorted(found)
    assert all(0 <= one.at < 10_000 * clock.HOUR for one in found)
    causes = Counter(one.cause for one in found)
    assert causes["by slot"] == pytest.approx(10_000, rel=0.04)
    assert causes["by node"] == pytest.approx(10_000, rel=0.04)
    assert Counter(one.node for one in found if one.kind == "process")[0] == pytest.approx(5_000, rel=0.06)
    repairs = [(one.back - one.at) / clock.HOUR for one in found if one.kind == "node"]
    assert sum(repairs) / len(repairs) == pytest.approx(3, rel=0.04)
    assert all(one.back == one.at for one in found if one.kind == "process")


def test_a_seed_draws_the_same_and_causes_are_drawn_apart() -> None:
    one, two = Rate("one", "process", per_slot_hour=0.01), Rate("two", "process", per_slot_hour=0.01)

    def times(rates: list[Rate], seed: int) -> list[int]:
        return [failure.at for failure in faults.drawn(rates, [8], 100 * clock.DAY, seed) if failure.cause == "one"]

    assert times([one], 1) == times([one, two], 1), "another cause changes nothing"
    assert times([one], 1) != times([one], 2)
