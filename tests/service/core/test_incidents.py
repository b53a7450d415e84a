from __future__ import annotations

import pytest

from service.contracts.events import Fault
from service.contracts.job import Cause
from service.core import incidents, recovery
from service.core.state import Incident, Job
from tests.service.core import world


def incident(attempt: int, step: int, redone: int | None = None, recover_s: float | None = None) -> Incident:
    return Incident(
        attempt,
        attempt,
        Cause.INFRASTRUCTURE,
        "peer",
        "",
        None,
        None,
        step,
        100.0,
        0.1,
        "",
        (),
        redone,
        recover_s,
    )


def test_an_incident_keeps_its_root_and_a_few_echoes() -> None:
    faults = [
        *(Fault("peer", "reset", rank=rank) for rank in range(500)),
        Fault("process_died", "killed", rank=500),
    ]
    job = Job("a", 1, world.spec(), 0.0, attempt=3, step=57, progress_at=98.0)
    opened = incidents.opened(job, recovery.judge(job, faults, 100.0), faults, 100.0)
    assert (opened.kind, opened.rank, opened.step, opened.detect_s) == ("process_died", 500, 57, 2.0)
    assert [fault.rank for fault in opened.faults] == [500, 0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("before", "resumed_step", "redone"),
    [
        ([(1, 80, None)], 50, [30]),
        ([(1, 80, None)], 80, [0]),
        ([(1, 80, None)], 81, [0]),
        ([(1, 80, None), (2, 80, None)], 50, [30, 0]),  # the second attempt never resumed
        ([(1, 80, 30), (2, 60, None)], 50, [30, 10]),
    ],
)
def test_what_is_redone_is_charged_once(
    before: list[tuple[int, int, int | None]], resumed_step: int, redone: list[int]
) -> None:
    settled = incidents.settled([incident(*values) for values in before], resumed_step)
    assert [one.steps_redone for one in settled] == redone


def test_a_new_step_closes_the_incidents_of_earlier_attempts() -> None:
    closed = incidents.closed([incident(1, 8, 0, 5.0), incident(2, 8, 0), incident(3, 8)], attempt=3, at=107.0)
    assert [one.recover_s for one in closed] == [5.0, 7.0, None]


def test_what_is_reported_late_raises_the_step_of_the_fault() -> None:
    caught_up = incidents.caught_up([incident(1, 8, 0), incident(2, 8)], attempt=2, step=9, later_s=0.5)
    assert [one.step for one in caught_up] == [8, 9]
    assert [one.detect_s for one in caught_up] == [incident(1, 8).detect_s, max(0.0, incident(2, 8).detect_s - 0.5)]
