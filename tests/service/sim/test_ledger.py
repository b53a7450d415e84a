from __future__ import annotations

from fractions import Fraction

from service.sim.ledger import Ledger, Span, Use
from service.sim.stretch import Parts


def test_a_slot_is_down_spare_or_the_jobs() -> None:
    """Ten slots, of which the job wants six."""
    ledger = Ledger(10, 6)
    ledger.idle(Span(0, 100, Use.WAITING, 0, alive=9, ranks=0))
    ledger.idle(Span(100, 110, Use.RESTART, 1, alive=4, ranks=4))
    assert ledger.slots[Use.WAITING] == 600
    assert ledger.slots[Use.SPARE] == 300
    assert ledger.slots[Use.RESTART] == 40
    assert ledger.slots[Use.DOWN] == 100 + 60
    assert (ledger.clock[Use.WAITING], ledger.clock[Use.RESTART]) == (100, 10)


def test_a_smaller_layout_is_worth_less() -> None:
    """At two thirds of the speed a second of six slots is worth four; a fifth slot is alive, and lost to the layout."""
    ledger = Ledger(6, 6)
    ledger.worked(Span(0, 90, Use.USEFUL, 1, alive=5, ranks=4), Parts(again=30, fresh=45, stalled=15), Fraction(2, 3))
    assert ledger.slots[Use.USEFUL] == 4 * 45
    assert ledger.slots[Use.REDONE] == 4 * 30
    assert ledger.slots[Use.SMALLER] == 75
    assert ledger.slots[Use.SNAPSHOTS] == 5 * 15
    assert ledger.slots[Use.DOWN] == 90
    assert sum(ledger.slots.values()) == 6 * 90
    ledger.lost(9, Fraction(2, 3))
    assert ledger.slots[Use.USEFUL] == 4 * 36
    assert ledger.slots[Use.REDONE] == 4 * 39
    assert (ledger.clock[Use.USEFUL], ledger.clock[Use.REDONE], ledger.clock[Use.SNAPSHOTS]) == (36, 39, 15)
    assert sum(ledger.slots.values()) == 6 * 90


def test_a_smaller_layout_that_uses_its_slots_better_loses_less_than_nothing() -> None:
    ledger = Ledger(5, 5)
    ledger.worked(Span(0, 10, Use.USEFUL, 1, alive=4, ranks=4), Parts(fresh=10), Fraction(1))
    assert (ledger.slots[Use.USEFUL], ledger.slots[Use.SMALLER], ledger.slots[Use.DOWN]) == (50, -10, 10)
