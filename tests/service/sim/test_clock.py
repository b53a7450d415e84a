from __future__ import annotations

import pytest

from service.sim import clock
from service.sim.clock import Agenda


@pytest.mark.parametrize(
    ("seconds", "us"), [(0, 0), (1, 1_000_000), (0.1, 100_000), (1e-6, 1), (4_665_600, 4_665_600_000_000)]
)
def test_seconds_are_whole_microseconds(seconds: float, us: int) -> None:
    assert clock.us(seconds) == us
    assert clock.seconds(us) == seconds


def test_an_agenda_runs_in_order_and_stops_in_time() -> None:
    agenda, seen = Agenda(), list[tuple[int, str]]()

    def note(name: str) -> None:
        seen.append((agenda.now, name))

    agenda.at(5, lambda: note("second"))
    agenda.at(3, lambda: (note("first"), agenda.after(4, lambda: note("added")), agenda.at(1, lambda: note("late"))))
    agenda.at(5, lambda: note("third"))
    agenda.at(9, lambda: note("never"))
    agenda.run(9)
    assert seen == [(3, "first"), (3, "late"), (5, "second"), (5, "third"), (7, "added")]
    assert agenda.now == 9


def test_an_agenda_that_is_over_keeps_its_time() -> None:
    agenda, count = Agenda(), list[int]()
    for at in (1, 2, 3):
        agenda.at(at, lambda: count.append(agenda.now))
    agenda.run(100, lambda: len(count) == 2)
    assert (count, agenda.now) == ([1, 2], 2)
