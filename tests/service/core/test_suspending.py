"""A job that gives its slots back: by its user's wish, to go on later, or for good."""

from __future__ import annotations

import itertools

import pytest

from service.contracts import events
from service.contracts.job import Cause, JobSpec, Phase
from service.core import accounts, liveness
from service.core.commands import PauseGang, ReleaseGang, SaveGang, StartGang, StopGang
from tests.service.core import world
from tests.service.core.world import World

LIMITS = liveness.Limits(pausing_s=5.0)
LONG = world.spec(steps=1000)
LIVE = (Phase.QUEUED, Phase.PLACING, Phase.STARTING, Phase.RUNNING, Phase.RESCALING, Phase.RECOVERING)


def brought(phase: Phase, job: JobSpec = LONG) -> World:
    here = World(world.fleet(2), LIMITS)
    here.bring(phase, job=job)
    return here


def answered(here: World, uid: str = "a") -> None:
    """What was ordered of the gang is done."""
    for _ in range(2):
        job = here.job(uid)
        if job.placement is not None and job.stopping:
            here.stopped(uid)
        elif job.pause is not None:
            here.paused(uid)


@pytest.mark.parametrize("phase", LIVE)
def test_a_suspended_job_holds_nothing_whatever_it_did(phase: Phase) -> None:
    here = brought(phase)
    here.suspend()
    assert here.job().phase in (Phase.SUSPENDING, Phase.SUSPENDED)
    answered(here)
    job = here.job()
    assert (job.phase, job.holds_slots) == (Phase.SUSPENDED, False)
    assert job.reason == f"suspended after step {job.step} by request; it holds no slots"
    here.tick(1000)
    assert here.job().phase is Phase.SUSPENDED
    here.resume()
    assert here.job().phase is Phase.PLACING
    here.start(resumed=job.step)
    here.steps(job.step + 1, job.step + 2)
    assert here.job().high_step == job.step + 2


def test_a_gang_at_work_is_paused_with_its_state_in_storage() -> None:
    here = brought(Phase.RUNNING)
    (order,) = here.suspend().commands
    assert (type(order), order.durable) == (PauseGang, True)
    assert here.job().reason == "suspend requested; ends after the step under way"
    (order,) = here.paused().commands
    assert (type(order), order.keep) == (StopGang, False)


def test_a_rescaling_gang_that_is_suspended_is_asked_again_for_storage() -> None:
    here = brought(Phase.RESCALING)
    assert [type(order) for order in here.suspend().commands] == [PauseGang]
    assert here.job().pause.durable


def test_what_a_broken_job_kept_is_let_go_when_it_is_suspended() -> None:
    here = brought(Phase.RECOVERING)
    assert here.suspend().commands == ()
    assert [type(order) for order in here.stopped().commands] == [ReleaseGang]
    assert here.job().phase is Phase.SUSPENDED


def test_a_pause_that_is_not_answered_is_a_stop() -> None:
    here = brought(Phase.RUNNING)
    here.suspend()
    assert here.tick(5).commands == ()
    assert [type(order) for order in here.tick(2).commands] == [StopGang]
    assert here.paused().commands == ()
    here.stopped()
    assert here.job().phase is Phase.SUSPENDED


@pytest.mark.parametrize("how", ["a rank dies", "a node is lost"])
def test_what_breaks_while_it_ends_is_no_incident(how: str) -> None:
    here = brought(Phase.RUNNING)
    here.suspend()
    if how == "a rank dies":
        here.fault()
    else:
        here.observe(world.without(here.state.fleet, "n0"))
    assert isinstance(here.commands[-1], StopGang)
    here.stopped()
    assert (here.job().phase, here.job().incidents, here.job().charges) == (Phase.SUSPENDED, (), ())


def test_who_resumes_before_it_has_ended_goes_on_at_once() -> None:
    here = brought(Phase.RUNNING)
    here.suspend()
    here.resume()
    assert here.job().phase is Phase.SUSPENDING
    here.paused()
    here.stopped()
    assert here.job().phase is Phase.PLACING
    here.start(resumed=4)
    here.steps(5, 6)
    assert here.job().phase is Phase.RUNNING


def test_suspended_twice_and_resumed_twice_is_once() -> None:
    here = brought(Phase.RUNNING)
    here.suspend()
    assert here.suspend().commands == ()
    answered(here)
    here.suspend()
    here.resume()
    assert here.resume().records == ()
    assert here.job().phase is Phase.PLACING


def test_a_job_that_has_all_its_steps_succeeds_though_it_was_to_be_suspended() -> None:
    here = brought(Phase.RUNNING, world.spec(steps=4))
    here.suspend()
    here.gang(events.GangFinished)
    here.stopped()
    assert here.job().phase is Phase.SUCCEEDED


def test_the_time_of_a_suspension_is_its_own_and_no_pause_costs_it() -> None:
    here = brought(Phase.RUNNING)
    here.fault()
    here.stopped()
    here.suspend()
    answered(here)
    here.tick(500)
    here.resume()
    here.start(resumed=4)
    here.steps(5, 5)
    job = here.job()
    assert job.incidents[0].spent.suspended_s == 500
    assert accounts.accounts(job, here.now).spent.suspended_s == 500
    assert accounts.accounts(job, here.now).total_s == here.now - job.submitted_at


def test_a_suspended_job_can_be_changed_restored_and_cancelled() -> None:
    here = brought(Phase.SUSPENDED)
    here.rescale(1)
    here.restore(2)
    assert (here.job().phase, here.job().wanted_slots, here.job().checkpoint_step) == (Phase.SUSPENDED, 1, 2)
    here.resume()
    assert here.job().layout.world == 1
    here.suspend()
    answered(here)
    here.cancel()
    assert here.job().phase is Phase.CANCELLED


def test_it_waits_for_nothing_and_nobody_waits_for_it() -> None:
    here = brought(Phase.SUSPENDED, world.spec(slots=4, steps=100))
    here.submit("b", world.spec(slots=4, steps=100))
    here.start("b")
    here.steps(1, 2, "b")
    here.resume()
    assert (here.job().phase, here.job().position) == (Phase.QUEUED, 1)
    assert here.job().reason == "needs 4 slots; 0 of 4 are free, 4 held by b"


@pytest.mark.parametrize("phase", [Phase.FINISHING, Phase.CANCELLING, Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED])
def test_what_ends_is_not_suspended(phase: Phase) -> None:
    here = World(world.fleet(2))
    here.bring(phase)
    assert here.suspend().records == ()
    assert here.job().phase is phase


def test_a_graceful_cancel_completes_the_step_and_has_it_in_storage() -> None:
    here = brought(Phase.RUNNING)
    (order,) = here.cancel(graceful=True).commands
    assert (type(order), order.durable, here.job().phase) == (PauseGang, True, Phase.CANCELLING)
    here.steps(5, 5)
    here.gang(events.CheckpointPublished, step=5, manifest="m5")
    assert [type(order) for order in here.paused().commands] == [StopGang]
    here.stopped()
    assert (here.job().phase, here.job().checkpoint) == (Phase.CANCELLED, "m5")


@pytest.mark.parametrize("how", ["cancelled now", "a rank dies", "no answer"])
def test_a_graceful_cancel_ends_also_otherwise(how: str) -> None:
    here = brought(Phase.RUNNING)
    here.cancel(graceful=True)
    if how == "cancelled now":
        here.cancel()
    elif how == "a rank dies":
        here.fault()
    else:
        here.tick(8)
    assert isinstance(here.commands[-1], StopGang)
    here.stopped()
    assert (here.job().phase, here.job().incidents) == (Phase.CANCELLED, ())


def test_a_checkpoint_by_request() -> None:
    here = brought(Phase.RUNNING)
    decision = here.tell(events.SaveRequested("a", here.now))
    assert decision.commands == (SaveGang("a", 1),)
    assert decision.records[-1].type == "CheckpointRequested"


def test_a_start_by_request_is_a_pause_at_nobodys_cost() -> None:
    here = brought(Phase.RUNNING)
    (order,) = here.tell(events.RestartRequested("a", here.now)).commands
    assert (type(order), order.durable) == (PauseGang, False)
    here.paused()
    assert here.commands[-1].keep
    here.stopped()
    assert isinstance(here.commands[-1], StartGang)
    (incident,) = here.job().incidents
    assert (incident.kind, incident.cause, here.job().charges) == ("restart", None, ())


@pytest.mark.parametrize(
    ("phase", "kind"), list(itertools.product(LIVE[:3] + LIVE[4:], [events.SaveRequested, events.RestartRequested]))
)
def test_where_no_step_is_under_way_there_is_nothing_to_save_or_start_again(phase: Phase, kind: type) -> None:
    here = brought(phase)
    assert here.tell(kind("a", here.now)).records == ()


def changed(**fields: object) -> JobSpec:
    return world.job_spec(steps=1000, **fields)


def test_what_a_user_changes_counts_at_once() -> None:
    here = brought(Phase.RUNNING, changed())
    here.tell(events.SpecChanged("a", changed(budgets={"user_error": 0}, priority=7), 2, here.now))
    assert (here.job().generation, here.job().phase) == (2, Phase.RUNNING)
    assert here.records[-1].reason == "budgets and priority changed by request; generation 2 of its spec"
    here.tell(events.SpecChanged("a", changed(), 2, here.now))  # heard again
    assert here.job().spec.priority == 7
    here.fault("user", "ValueError: bad")
    assert here.job().incidents[0].cause is Cause.USER_ERROR
    assert here.job().phase is Phase.FINISHING


@pytest.mark.parametrize(
    ("policy", "pauses"), [({"every_steps": 7}, True), ({"snapshot_every": 7}, True), ({"keep": 7}, False)]
)
def test_ranks_hear_of_another_rhythm_of_saves_by_a_new_start(policy: dict[str, int], pauses: bool) -> None:
    here = brought(Phase.RUNNING, changed())
    decision = here.tell(events.SpecChanged("a", changed(checkpoint=policy), 2, here.now))
    assert [type(order) for order in decision.commands] == [PauseGang] * pauses
    if pauses:
        here.paused()
        here.stopped()
        here.start(resumed=4)
        here.steps(5, 6)
        assert here.job().phase is Phase.RUNNING


def test_a_gang_that_starts_meanwhile_is_started_again_once_it_works() -> None:
    here = brought(Phase.STARTING, changed())
    assert here.tell(events.SpecChanged("a", changed(checkpoint={"every_steps": 7}), 2, here.now)).commands == ()
    here.steps(1, 2)
    assert isinstance(here.commands[-1], PauseGang)
