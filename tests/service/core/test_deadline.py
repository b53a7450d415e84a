"""A job that is not over by its deadline ends, whatever it does."""

from __future__ import annotations

import pytest

from service.contracts import events
from service.contracts.job import Phase
from service.core import accounts, liveness
from service.core.commands import PauseGang, StopGang
from service.core.status import status
from tests.service.core import world
from tests.service.core.world import World

LIMITS = liveness.Limits(pausing_s=5.0)
LIVE = [phase for phase in Phase if not phase.terminal and phase not in (Phase.FINISHING, Phase.CANCELLING)]


def ended(here: World) -> None:
    for _ in range(2):
        job = here.job()
        if job.pause is not None:
            here.paused()
        elif job.placement is not None:
            here.stopped()


@pytest.mark.parametrize("phase", LIVE)
def test_it_fails_and_says_so_in_any_phase(phase: Phase) -> None:
    here = World(world.fleet(2), LIMITS)
    here.bring(phase, job=world.job_spec(steps=1000, deadline_s=100))
    here.tick(50)
    assert here.job().phase is not Phase.FAILED
    here.now = here.job().submitted_at + 100.5
    here.tick()
    ended(here)
    job = here.job()
    assert (job.phase, job.holds_slots) == (Phase.FAILED, False)
    assert job.reason.startswith(f"its deadline of 100 s passed after step {job.step} of 1000")
    assert status(job).exit is None  # no fault ended it


def test_a_gang_at_work_completes_its_step_and_has_it_in_storage() -> None:
    here = World(world.fleet(2), LIMITS)
    here.bring(Phase.RUNNING, job=world.job_spec(steps=1000, deadline_s=30))
    here.steps(5, 70)
    decision = here.tick(1)
    assert [(type(order), getattr(order, "durable", None)) for order in decision.commands] == [(PauseGang, True)]
    assert [type(order) for order in here.paused().commands] == [StopGang]


def test_one_that_is_over_in_time_succeeds() -> None:
    here = World(world.fleet(2), LIMITS)
    here.bring(Phase.RUNNING, job=world.job_spec(steps=4, deadline_s=30))
    here.gang(events.GangFinished)
    here.tick(100)
    here.stopped()
    assert here.job().phase is Phase.SUCCEEDED


def test_slots_are_counted_by_the_second_as_long_as_they_are_held() -> None:
    here = World(world.fleet(2), LIMITS)
    here.submit(job=world.spec(slots=4, steps=1000))
    here.tick(10)
    here.start()
    here.steps(1, 4)  # two seconds
    assert accounts.slot_seconds(here.job(), here.now) == 4 * 12
    here.fault()
    here.tick(1)
    here.stopped()  # kept, and placed again
    here.start(resumed=4)
    here.tick(5)
    here.cancel()
    here.tick(1)
    here.stopped()
    assert (here.job().slot_s, accounts.slot_seconds(here.job(), here.now + 100)) == (4 * 19, 4 * 19)
    told = status(here.job())
    assert (told.slot_s, told.slots) == (4 * 19, 0)
