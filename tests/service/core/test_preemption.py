"""Who gives way to whom: priorities, filling in, quotas."""

from __future__ import annotations

from typing import Any

import pytest

from service.contracts.job import JobSpec, Phase
from service.core import liveness
from service.core.commands import PauseGang, StartGang
from tests.service.core import world
from tests.service.core.world import World

LIMITS = liveness.Limits(settle_s=2.0, cooldown_s=1.0, pausing_s=5.0)


def spec(slots: int, priority: int = 0, least: int | None = None, most: int | None = None, **fields: Any) -> JobSpec:
    elastic = None if least is None else {"min_slots": least, "max_slots": most}
    resources = {"device": "cpu", "slots": slots, "elastic": elastic}
    return world.job_spec(steps=1000, priority=priority, resources=resources, **fields)


def going(here: World, uid: str, job: JobSpec, project: str = "default") -> None:
    here.submit(uid, job, project=project)
    here.start(uid)
    here.steps(1, 4, uid)


def yielded(here: World, *uids: str) -> None:
    """They have ended, as they were told."""
    for uid in uids:
        here.paused(uid)
    for uid in uids:
        here.stopped(uid)


def phases(here: World, uids: str) -> list[Phase]:
    return [here.job(uid).phase for uid in uids]


def test_a_job_of_lower_priority_yields_all_and_goes_on_later() -> None:
    here = World(world.fleet(2), LIMITS)
    going(here, "a", spec(4))
    (order,) = here.submit("b", spec(4, priority=5)).commands
    assert (type(order), order.uid, order.durable) == (PauseGang, "a", True)
    assert here.job("a").reason == "preempted: b needs its slots, of priority 5; ends after the step under way"
    yielded(here, "a")
    assert phases(here, "ab") == [Phase.QUEUED, Phase.PLACING]
    assert (here.job("a").incidents, here.job("a").position) == ((), 1)
    here.cancel("b")
    here.stopped("b")
    assert here.job("a").phase is Phase.PLACING
    here.start("a", resumed=4)
    here.steps(5, 6, "a")
    assert here.job("a").high_step == 6


def test_who_can_be_smaller_is_and_nobody_is_suspended() -> None:
    here = World(world.fleet(4), LIMITS)
    going(here, "a", spec(4))
    going(here, "e", spec(4, least=2))
    decision = here.submit("b", spec(2, priority=1))
    assert [(type(order), order.uid, order.durable) for order in decision.commands] == [(PauseGang, "e", False)]
    yielded(here, "e")
    assert phases(here, "aeb") == [Phase.RUNNING, Phase.PLACING, Phase.PLACING]
    assert [here.job(uid).layout.world for uid in "eb"] == [2, 2]


def test_of_several_those_of_lowest_priority_yield_and_no_more_than_needed() -> None:
    here = World(world.fleet(4), LIMITS)
    for uid, slots, priority in (("a", 2, 3), ("c", 2, 1), ("d", 4, 2)):
        going(here, uid, spec(slots, priority))
    assert [order.uid for order in here.submit("b", spec(2, priority=9)).commands] == ["c"]
    here.cancel("b")
    yielded(here, "c")
    here.start("c", resumed=4)
    here.steps(5, 6, "c")
    assert [order.uid for order in here.submit("x", spec(4, priority=9)).commands] == ["d"]  # c's would not do


@pytest.mark.parametrize("priority", [0, -1])
def test_an_equal_or_higher_one_does_not_yield(priority: int) -> None:
    here = World(world.fleet(2), LIMITS)
    going(here, "a", spec(4))
    assert here.submit("b", spec(4, priority)).commands == ()
    assert here.job("b").reason == "needs 4 slots; 0 of 4 are free, 4 held by a"


def test_nobody_yields_where_that_would_not_make_room() -> None:
    here = World(world.fleet(4), LIMITS)
    going(here, "a", spec(4, priority=9))
    going(here, "c", spec(4))
    assert here.submit("b", spec(8, priority=5)).commands == ()
    assert here.job("c").phase is Phase.RUNNING


def test_the_priority_of_a_queue_is_that_of_its_jobs_and_may_change() -> None:
    here = World(world.fleet(2), LIMITS)
    here.share({"default": 0, "urgent": 0})
    going(here, "a", spec(4, priority=9))
    assert here.submit("b", spec(4, queue="urgent")).commands == ()
    assert [order.uid for order in here.share({"default": 0, "urgent": 1}).commands] == ["a"]


def test_a_later_job_fills_in_and_yields_when_the_first_could_run() -> None:
    here = World(world.fleet(4), LIMITS)
    going(here, "a", spec(6))
    here.submit("b", spec(4))
    going(here, "c", spec(2))
    assert here.job("c").backfilled
    assert (here.job("b").phase, here.job("b").position) == (Phase.QUEUED, 1)
    here.cancel("a")
    assert here.job("c").phase is Phase.RUNNING
    here.stopped("a")
    assert phases(here, "bc") == [Phase.PLACING, Phase.RUNNING]  # there was room without


def test_who_fills_in_is_not_what_the_first_waits_for() -> None:
    here = World(world.fleet(4), LIMITS)
    going(here, "a", spec(6))
    here.submit("b", spec(8))
    going(here, "c", spec(2))
    here.cancel("a")
    assert [(type(order), order.uid) for order in here.stopped("a").commands] == [(PauseGang, "c")]
    assert here.job("c").reason.startswith("preempted: b needs its slots, which it only filled in for")
    here.submit("d", spec(2))
    assert here.job("d").phase is Phase.QUEUED  # nobody fills in while slots are given back
    yielded(here, "c")
    assert phases(here, "bcd") == [Phase.PLACING, Phase.QUEUED, Phase.QUEUED]


def test_who_was_there_first_does_not_yield_to_a_later_one_of_its_priority_though_it_filled_in() -> None:
    here = World(world.fleet(4), LIMITS)
    going(here, "a", spec(6))
    here.submit("b", spec(8))
    going(here, "c", spec(2))
    here.cancel("b")
    assert here.submit("d", spec(2)).commands == ()
    assert here.job("c").phase is Phase.RUNNING


def test_a_smaller_one_grows_again_but_not_past_who_comes_first() -> None:
    here = World(world.fleet(4), LIMITS)
    going(here, "e", spec(8, least=2))
    here.submit("b", spec(4, priority=1))
    yielded(here, "e")
    for uid, step in (("b", 0), ("e", 4)):
        here.start(uid, resumed=step)
        here.steps(step + 1, step + 2, uid)
    here.submit("c", spec(6, priority=1))
    here.cancel("b")
    here.tick(5)
    assert here.stopped("b").commands != ()
    yielded(here, "e")
    assert [(uid, here.job(uid).layout.world) for uid in "ce"] == [("c", 6), ("e", 2)]
    here.start("c")
    here.start("e", resumed=6)
    here.steps(7, 8, "e")
    here.cancel("c")
    here.stopped("c")
    here.tick(5)
    assert here.job("e").phase is Phase.RESCALING
    here.paused("e")
    here.stopped("e")
    assert here.job("e").layout.world == 8


def test_a_projects_jobs_hold_no_more_than_its_quota_together() -> None:
    here = World(world.fleet(4), LIMITS)
    here.share(quotas={"vision": 4})
    going(here, "a", spec(2), "vision")
    here.submit("b", spec(4), project="vision")
    here.submit("c", spec(2), project="vision")
    here.submit("d", spec(4), project="speech")
    assert phases(here, "abcd") == [Phase.RUNNING, Phase.QUEUED, Phase.PLACING, Phase.PLACING]
    assert here.job("b").reason == (
        "needs 4 slots; 4 of the 4 that the quota of project vision allows are held by its other jobs"
    )
    assert here.submit("x", spec(8), project="vision").commands == ()
    assert here.job("x").reason == "needs 8 slots, more than the 4 that the quota of project vision allows"
    here.share(quotas={"vision": 8})
    here.cancel("d")
    here.stopped("d")
    assert here.job("b").phase is Phase.PLACING


def test_an_elastic_job_is_as_large_as_its_quota_allows() -> None:
    here = World(world.fleet(4), LIMITS)
    here.share(quotas={"vision": 6})
    going(here, "a", spec(8, least=2), "vision")
    assert here.job("a").layout.world <= 6
    world_before = here.job("a").layout.world
    here.tick(100)
    assert here.job("a").layout.world == world_before
    assert here.job("a").phase is Phase.RUNNING


def test_decisions_are_the_same_each_time() -> None:
    def played() -> list[Any]:
        here = World(world.fleet(4), LIMITS)
        going(here, "a", spec(2))
        going(here, "e", spec(4, least=2))
        going(here, "c", spec(2))
        here.submit("b", spec(6, priority=1))
        return [(type(order), order.uid) for order in here.commands if not isinstance(order, StartGang)]

    assert played() == played()
