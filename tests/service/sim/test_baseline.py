from __future__ import annotations

import pytest

from service.sim import baseline, clock, simulate
from service.sim.faults import Failure
from service.sim.ledger import Use
from tests.service.sim import world
from tests.service.sim.world import down


@pytest.mark.parametrize(
    ("failures", "spares"),
    [
        ([], 0),
        ([down(0, 0, 1000)], 1),
        ([down(0, 0, 9)], 0),  # for less than a hundredth of the time
        ([down(0, 100, 300), down(1, 200, 400)], 2),
        ([down(0, 100, 300), down(1, 295, 400)], 1),
        ([world.process(0, 5)], 0),
    ],
)
def test_spares_cover_all_but_a_hundredth_of_the_time(failures: list[Failure], spares: int) -> None:
    assert baseline.spares(failures, clock.us(1000)) == spares


def test_it_is_smaller_by_its_spares_and_goes_back_half_an_hour() -> None:
    """Three of four replicas, so steps of 40/3 s; a checkpoint each 135 steps. A node is lost in the 81st step."""
    given = world.scenario([down(0, 700 + 1000, 2900)], 5000, elastic=True)
    theirs = baseline.of(given)
    assert theirs.spec.resources.slots == 3
    assert (theirs.checkpoint.every, theirs.snapshot.every, theirs.spec.resources.elastic) == (135, 0, None)
    result = simulate.run(theirs)
    world.check(theirs, result)
    spent = world.spent(result)
    assert spent[Use.RESTART] == 600 + 600
    assert spent[Use.REDONE] == pytest.approx(1100, abs=0.001)  # all since the start
    assert spent[Use.DETECTION] == 5
    assert Use.WAITING not in spent
    idle = result.ledger.slots[Use.SMALLER]  # its spare node, while all four are there
    assert idle == pytest.approx(clock.us(spent[Use.USEFUL] + spent[Use.REDONE] - (2900 - 1705 - 600)), rel=1e-3)


def test_a_start_that_takes_ten_minutes_is_no_fault_whatever_else_happens_meanwhile() -> None:
    given = world.scenario([down(0, 2000, 2300), down(1, 2010, 2400)], 5000, nodes=6)
    result = world.run(baseline.of(given))
    assert {incident.kind for incident in result.job.incidents} == {"node_lost"}


def test_one_replica_is_left_however_few_nodes_there_are() -> None:
    theirs = baseline.of(world.scenario([down(0, 10, 900), down(1, 10, 900)], nodes=2, spec=world.job(dp=2)))
    assert theirs.spec.resources.slots == 1
