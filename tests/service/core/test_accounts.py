from __future__ import annotations

import dataclasses

import pytest

from service.contracts import events
from service.contracts.job import Phase
from service.core import accounts, status
from service.core.accounts import Accounts
from service.core.state import Spent
from tests.service.core import world
from tests.service.core.world import STEP_S, World


def of(here: World) -> Accounts:
    return accounts.accounts(here.job(), here.now)


def recovered(here: World) -> None:
    """A fault 0.25 s after step 4, known at once; each phase has another length; steps 3 and 4 are done again."""
    here.submit(job=world.spec(steps=8))
    here.now += 1
    here.gang(events.GangStarted)
    here.now += 2
    here.gang(events.GangResumed, step=0, manifest=None)
    here.steps(1, 4)
    here.now += 0.25
    here.fault()
    here.now += 4
    here.stopped()
    here.now += 8
    here.gang(events.GangStarted)
    here.now += 16
    here.gang(events.GangResumed, step=2, manifest="m2")
    here.now += 32
    here.steps(3, 5)


def test_each_second_is_counted_once() -> None:
    here = World(world.fleet(1))
    recovered(here)
    (incident,) = here.job().incidents
    assert incident.spent == Spent(stop_s=4, place_s=0, start_s=8, load_s=16, first_step_s=32)
    assert (incident.detect_s, incident.tier) == (0.25, "storage")
    assert here.job().spent == Spent(start_s=1, load_s=2)
    assert here.job().redone_s == 2 * STEP_S
    booked = of(here)
    assert booked == Accounts(5 * STEP_S, 2 * STEP_S, 0.25, Spent(4, 0, 9, 18, 32), 0.0)
    assert booked.total_s == here.now - here.job().submitted_at
    (view,) = status.status(here.job()).incidents
    assert (view.stop_s, view.start_s, view.load_s, view.first_step_s) == (4, 8, 16, 32)


def test_what_is_between_steps_and_what_still_goes_on_is_counted() -> None:
    here = World(world.fleet(1))
    recovered(here)
    here.now += 3
    here.steps(6, 6)
    here.now += 1
    assert of(here).between_s == 4
    here.fault()
    here.now += 5
    booked = of(here)
    assert (booked.detect_s, booked.spent.stop_s, booked.between_s) == (1.25, 9, 3)
    assert booked.total_s == here.now - here.job().submitted_at


def test_a_step_that_is_told_late_was_no_time_of_detection() -> None:
    here = World(world.fleet(1))
    here.bring(Phase.RUNNING)
    here.now += 2
    here.fault()
    here.gang(events.StepsCompleted, steps=(world.step(5, here.now - 1.5),))
    (incident,) = here.job().incidents
    assert incident.detect_s == 1.5
    assert of(here).total_s == here.now - here.job().submitted_at
    assert of(here).between_s == 0


def test_waiting_is_counted_too() -> None:
    here = World(world.fleet(1))
    here.submit(job=world.spec(slots=4))
    here.now += 7
    assert of(here).spent == Spent(place_s=7)
    here.observe(world.fleet(2))
    here.now += 1
    here.cancel()
    here.now += 1
    here.stopped()
    assert dataclasses.astuple(of(here).spent) == (1, 7, 1, 0, 0, 0)


@pytest.mark.parametrize("phase", Phase)
def test_a_job_in_any_phase_adds_up(phase: Phase) -> None:
    here = World(world.fleet(1))
    here.bring(phase)
    job = here.job()
    booked = accounts.accounts(job, job.ended_at or here.now)
    assert booked.total_s == (job.ended_at or here.now) - job.submitted_at
    assert booked.between_s == 0


def test_what_incidents_took_is_told_by_their_cause() -> None:
    here = World(world.fleet(1))
    recovered(here)
    (incident,) = here.job().incidents
    slots = incident.before.world if incident.before else 0
    took = slots * (incident.detect_s + incident.spent.total_s)
    assert took > 0
    assert accounts.lost(here.job()) == status.status(here.job()).lost_slot_s == {"infrastructure": took}
