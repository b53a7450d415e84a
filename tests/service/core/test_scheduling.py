"""What a job keeps, how it shrinks and grows, who gets what others do not need."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from service.contracts import events
from service.contracts.cluster import Fleet
from service.contracts.errors import PlacementRefused
from service.contracts.job import Cause, JobSpec, Phase
from service.core import elastic, liveness
from service.core.commands import PauseGang, RaiseStandbys, ReleaseGang, StartGang, StopGang
from service.core.state import Slot
from tests.service.core import world
from tests.service.core.world import World
from workers.spec import ParallelLayout

LIMITS = liveness.Limits(settle_s=2.0, cooldown_s=1.0, pausing_s=5.0)
TP2 = {"dp": 4, "tp": 2}


def bounded(
    slots: int = 8, least: int = 2, most: int | None = None, parallel: Any = "auto", spares: int = 0, steps: int = 1000
) -> JobSpec:
    resources = {
        "device": "cpu", "slots": slots, "spares": spares, "elastic": {"min_slots": least, "max_slots": most},
    }  # fmt: skip
    return world.job_spec(steps=steps, resources=resources, parallel=parallel)


def back(here: World, name: str, again: str) -> Fleet:
    """The fleet with a node that was lost, under another id."""
    node = next(node for node in FOUR.nodes if node.name == name)
    nodes = (*here.state.fleet.nodes, dataclasses.replace(node, id=again))
    return Fleet(tuple(sorted(nodes, key=lambda one: one.name)))


FOUR = world.fleet(4)


def going(job: JobSpec, nodes: Fleet = FOUR, limits: liveness.Limits = LIMITS) -> World:
    """A world whose job `a` makes steps."""
    here = World(nodes, limits)
    here.submit(job=job)
    here.start()
    here.steps(1, 4)
    return here


def names(here: World, uid: str = "a") -> list[str]:
    return [slot.name for slot in here.job(uid).placement.slots]


def test_a_fault_keeps_what_stands_there_and_an_end_does_not() -> None:
    here = going(world.spec(slots=4, steps=4))
    here.fault()
    assert here.commands[-1].keep
    where = here.job().placement
    here.stopped()
    assert (here.job().phase, here.job().placement, here.job().kept) == (Phase.PLACING, where, None)
    here.start(resumed=4)
    here.gang(events.GangFinished)
    assert here.commands[-1].keep is False


@pytest.mark.parametrize("how", ["cancelled while it stops", "cancelled while it waits"])
def test_what_is_kept_goes_with_the_job(how: str) -> None:
    here = going(world.spec(slots=4))
    here.fault("user", "ValueError: bad")  # backs off for a second
    if how == "cancelled while it waits":
        here.stopped()
        assert here.job().kept is not None
        assert here.job().holds_slots
    here.cancel()
    here.stopped()
    assert here.job().phase is Phase.CANCELLED
    assert isinstance(here.commands[-1], ReleaseGang)


def test_a_lost_nodes_ranks_go_to_one_other_node_and_the_others_stay() -> None:
    here = going(world.job_spec(slots=6, parallel={"dp": 3, "tp": 2}, steps=100), world.fleet(5))
    assert names(here) == ["n0", "n0", "n1", "n1", "n2", "n2"]
    here.observe(world.without(here.state.fleet, "n1"))
    here.stopped()
    assert names(here) == ["n0", "n0", "n3", "n3", "n2", "n2"]


def test_a_pipeline_does_not_leave_its_rack_for_the_sake_of_what_is_kept() -> None:
    here = going(world.job_spec(slots=4, parallel={"pp": 4}, steps=100), world.fleet(3, 2))
    assert names(here) == ["n0", "n0", "n1", "n1"]
    here.observe(world.without(here.state.fleet, "n1", "n2"))
    here.stopped()
    assert names(here) == ["n3", "n3", "n4", "n4"]


def test_f23_two_jobs_lose_nodes_at_once_and_there_is_room_for_one() -> None:
    here = World(world.fleet(5))
    for uid in "ab":
        here.submit(uid, world.spec(slots=4, steps=100))
        here.start(uid)
        here.steps(1, 4, uid)
    here.observe(world.without(here.state.fleet, "n1", "n3"))
    here.stopped("b")
    assert here.job("b").kept is not None  # the one before it may not need what is kept
    here.stopped("a")
    assert here.job("a").phase is Phase.PLACING
    assert names(here, "a") == ["n0", "n0", "n4", "n4"]
    assert [type(order) for order in here.commands[-2:]] == [StartGang, ReleaseGang]
    assert (here.job("b").phase, here.job("b").holds_slots) == (Phase.RECOVERING, False)
    assert here.job("b").reason == "needs 4 slots; 2 of 6 are free, 4 held by a"
    here.observe(world.fleet(5))
    here.tick(30)
    assert here.job("b").phase is Phase.PLACING


def test_the_first_job_takes_what_is_left_of_a_later_one() -> None:
    here = World(world.fleet(3))
    here.submit("a", world.spec(slots=2, steps=100))
    here.submit("b", world.spec(slots=4, steps=100))
    for uid in "ab":
        here.start(uid)
        here.steps(1, 4, uid)
    here.fault("user", "ValueError: bad", uid="b")  # backs off
    here.stopped("b")
    here.observe(world.without(here.state.fleet, "n0", "n1"))
    here.stopped("a")
    assert names(here, "a") == ["n2", "n2"]
    assert [type(order) for order in here.commands[-2:]] == [ReleaseGang, StartGang]
    assert (here.commands[-2].uid, here.job("b").kept) == ("b", None)


def test_a_broken_job_goes_back_to_what_it_kept_while_an_earlier_one_waits() -> None:
    here = World(world.fleet(4))
    for uid in "ab":
        here.submit(uid, world.spec(slots=4, steps=100))
        here.start(uid)
        here.steps(1, 4, uid)
    here.observe(world.without(here.state.fleet, "n0"))
    here.stopped("a")
    assert here.job("a").placement is None
    here.fault(uid="b")
    here.stopped("b")
    assert here.job("b").phase is Phase.PLACING
    assert names(here, "b") == ["n2", "n2", "n3", "n3"]


@pytest.mark.parametrize(
    ("parallel", "gone", "then", "why"),
    [
        (TP2, ["n3"], "dp 3 x pp 1 x tp 2", "6 of 8 slots: node n3 is gone and no spare is left"),
        (TP2, ["n3", "n1"], "dp 2 x pp 1 x tp 2", "4 of 8 slots: nodes n1, n3 are gone and no spare is left"),
        ({"dp": 2, "pp": 2, "tp": 2}, ["n3"], "dp 1 x pp 2 x tp 2", "4 of 8 slots: node n3 is gone"),
        ({"dp": 8}, ["n3"], "dp 6 x pp 1 x tp 1", "6 of 8 slots: node n3 is gone and no spare is left"),
        ({"dp": 4, "tp": 2, "replicate": 4}, ["n3"], "dp 3 x pp 1 x tp 2", "6 of 8 slots"),
        ({"dp": 4, "tp": 2, "replicate": 2}, ["n3"], "dp 2 x pp 1 x tp 2", "4 of 8 slots"),
        ({"dp": 4, "tp": 2, "replica_weights": [1, 2, 1, 1]}, ["n3"], "dp 3 x pp 1 x tp 2", "6 of 8 slots"),
        ("auto", ["n3"], "dp 6 x pp 1 x tp 1", "6 of 8 slots"),
    ],
)
def test_a_job_that_lost_a_node_goes_on_smaller(parallel: Any, gone: list[str], then: str, why: str) -> None:
    here = going(bounded(parallel=parallel))
    before = here.job().layout
    here.observe(world.without(here.state.fleet, *gone))
    decision = here.stopped()
    job = here.job()
    assert (job.phase, str(job.layout)) == (Phase.PLACING, then)
    assert why in job.reason
    assert job.reason.endswith(f"; {then} at the same global batch of 16")
    assert [type(order) for order in decision.commands] == [StartGang]
    assert job.layout.tp == before.tp
    assert not set(names(here)) & set(gone)


def test_a_job_that_may_not_be_so_small_waits_and_says_so() -> None:
    here = going(bounded(parallel=TP2, least=6))
    here.observe(world.without(here.state.fleet, "n3", "n2"))
    here.stopped()
    assert here.job().phase is Phase.RECOVERING
    assert here.job().reason == (
        "needs 8 slots; 4 of 4 are free; 6 would do, and do not fit; it would not fit if all were free"
    )
    assert here.job().kept is None


def test_a_queued_job_begins_smaller_rather_than_wait() -> None:
    here = World(world.fleet(3), LIMITS)
    here.submit(job=bounded(parallel="auto"))
    assert here.job().layout.world == 6
    assert "6 of 8 slots: needs 8 slots; 6 of 6 are free; " in here.job().reason


def test_a_pipeline_gives_way_where_memory_is_not_at_stake() -> None:
    asked = {"dp": 2, "pp": 2, "tp": 2}
    here = going(bounded(parallel="auto"))
    job = dataclasses.replace(here.job(), layout=ParallelLayout.model_validate(asked))
    here.state = dataclasses.replace(here.state, jobs={"a": job})
    here.observe(world.without(here.state.fleet, "n3"))
    here.stopped()
    assert "dp 3 x pp 1 x tp 2 at the same global batch of 16" in here.job().reason


def test_it_grows_back_when_the_node_returns_and_has_settled() -> None:
    here = going(bounded(parallel=TP2))
    here.observe(world.without(here.state.fleet, "n3"))
    here.stopped()
    here.start(resumed=4)
    here.steps(5, 8)
    here.observe(back(here, "n3", "id9"))
    assert here.tick(3.9).commands == ()  # one strike doubles the time to settle
    decision = here.tick(0.2)
    assert [type(order) for order in decision.commands] == [PauseGang]
    assert here.job().phase is Phase.RESCALING
    assert here.job().reason.startswith("grows from 6 to 8 slots, dp 4 x pp 1 x tp 2: the remaining steps gain ")
    here.steps(9, 9)
    (stop,) = here.paused().commands
    assert (type(stop), stop.keep, here.job().phase) == (StopGang, True, Phase.RESCALING)
    (start,) = here.stopped().commands
    assert (str(start.layout), here.job().phase) == ("dp 4 x pp 1 x tp 2", Phase.PLACING)
    assert set(names(here)) == {"n0", "n1", "n2", "n3"}
    assert len(here.job().charges) == 1  # of the lost node
    here.start(resumed=9)
    here.steps(10, 10)
    lost, grown = here.job().incidents
    assert (lost.kind, str(lost.before), str(lost.after)) == ("node_lost", "dp 4 x pp 1 x tp 2", "dp 3 x pp 1 x tp 2")
    assert (grown.kind, grown.cause, grown.steps_redone, grown.tier) == ("rescale", None, 0, "memory")
    assert grown.recover_s is not None
    assert here.tick(50).commands == ()


def test_no_growth_where_it_does_not_pay() -> None:
    here = going(bounded(parallel=TP2, steps=20))
    here.observe(world.without(here.state.fleet, "n3"))
    here.stopped()
    here.now += 2
    here.start(resumed=4)
    here.steps(5, 8)
    here.observe(back(here, "n3", "id9"))
    here.tick(30)
    assert here.job().phase is Phase.RUNNING


def test_f8_a_flapping_node_does_not_make_it_swing() -> None:
    here = going(bounded(parallel=TP2, steps=100_000), limits=liveness.Limits(step_s=1e6))
    moves = 0
    for time in range(12):
        here.observe(world.without(here.state.fleet, "n3"))
        if here.job().phase is Phase.RECOVERING:
            moves += 1
            here.stopped()
            here.start(resumed=here.job().step)
            here.steps(here.job().step + 1, here.job().step + 2)
        here.observe(back(here, "n3", f"id3.{time}"))
        here.tick(150)
        if here.job().phase is Phase.RESCALING:
            here.paused()
            here.stopped()
            here.start(resumed=here.job().step)
            here.steps(here.job().step + 1, here.job().step + 2)
    assert moves <= 2


def test_more_than_it_wants_only_while_nobody_waits() -> None:
    here = going(bounded(slots=4, most=8, parallel={"dp": 2, "tp": 2}), world.fleet(2))
    here.observe(FOUR)
    here.submit("b", world.spec(slots=8))
    here.tick(10)
    assert here.job().phase is Phase.RUNNING
    here.cancel("b")
    here.tick(10)
    assert here.job().phase is Phase.RESCALING
    assert "grows from 4 to 8 slots" in here.job().reason


def test_a_fault_in_a_pause_is_a_fault() -> None:
    here = going(bounded(parallel=TP2))
    here.rescale(6)
    here.fault()
    assert (here.job().phase, here.job().pause) == (Phase.RECOVERING, None)
    assert here.job().incidents[-1].cause is Cause.INFRASTRUCTURE
    assert here.paused().records == ()
    here.stopped()
    assert here.job().layout.world == 6


def test_a_pause_that_is_not_answered_is_ended() -> None:
    here = going(bounded(parallel=TP2))
    here.rescale(6)
    assert here.tick(6.0).commands == ()  # its own time and two steps
    (stop,) = here.tick(0.1).commands
    assert (type(stop), stop.keep) == (StopGang, True)
    assert here.job().reason.startswith("attempt 1 did not pause within 6 s and is stopped: goes from 8 to 6 slots")
    assert here.paused().records == ()
    here.stopped()
    assert here.job().phase is Phase.PLACING


@pytest.mark.parametrize("stopped", [False, True])
def test_a_gang_that_ended_while_it_was_moved_is_followed_by_another(stopped: bool) -> None:
    here = going(bounded(parallel=TP2, steps=5))
    here.rescale(6)
    here.steps(5, 5)
    here.paused()
    if stopped:
        here.fault()  # too late to be one
        here.stopped()
    here.gang(events.GangFinished, attempt=1)
    if not stopped:
        here.stopped()
    here.start(resumed=5)
    here.gang(events.GangFinished)
    here.stopped()
    assert (here.job().phase, here.job().attempt, here.job().charges) == (Phase.SUCCEEDED, 2, ())
    assert here.job().incidents[-1].recover_s is not None


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.RECOVERING])
def test_a_request_to_a_job_that_waits_is_met_when_it_is_placed(phase: Phase) -> None:
    here = World(world.fleet(4))
    here.bring(phase, job=world.spec(slots=8))
    assert here.rescale(4).commands == ()
    if phase is Phase.RECOVERING:
        here.stopped()
    here.tick(100)
    assert (here.job().layout.world, here.job().rescale) == (4, None)
    assert here.job().spec.resources.slots == 8


def test_a_request_is_met_at_once_at_nobodys_cost_and_can_be_taken_back() -> None:
    here = going(world.job_spec(slots=4, parallel={"dp": 2, "tp": 2}, steps=1000))
    assert [type(order) for order in here.rescale(8).commands] == [PauseGang]
    here.paused()
    here.stopped()
    here.start(resumed=4)
    here.steps(5, 6)
    assert (here.job().layout.world, here.job().charges) == (8, ())
    here.rescale(4)
    assert here.job().wanted_slots is None
    here.paused()
    here.stopped()
    assert here.job().layout.world == 4


def test_a_request_that_can_not_be_met_says_why_once() -> None:
    here = going(world.job_spec(slots=4, parallel={"dp": 2, "tp": 2}, steps=1000))
    assert here.rescale(5).records[0].type == "RescaleRefused"
    decision = here.rescale(16)
    assert [line.type for line in decision.records] == ["RescaleRequested", "RescaleWaiting"]
    assert decision.records[-1].reason == "keeps its size for now: needs 16 cpu slots; 8 of 8 are free"
    assert here.tick(1).records == ()
    here.observe(world.fleet(8))
    assert here.job().phase is Phase.RESCALING


@pytest.mark.parametrize(
    ("slots", "layout", "says"),
    [
        (6, None, "dp 3 x pp 1 x tp 2 on 6 slots after a pause of about 15 s: dp 3 x pp 1 x tp 2 as the job asks"),
        (4, ParallelLayout(pp=4), "dp 1 x pp 4 x tp 1 on 4 slots after a pause of about 15 s: "
         "dp 1 x pp 4 x tp 1 as the job asks"),
        (4, None, "runs so already: dp 2 x pp 1 x tp 2"),
        (16, None, "needs 16 cpu slots; 8 of 8 are free"),
        (5, None, "dp 2 x pp 1 x tp 2 can't be made one of 5 slots by its dp alone"),
    ],
)  # fmt: skip
def test_a_request_can_be_tried_without_asking(slots: int, layout: ParallelLayout | None, says: str) -> None:
    here = going(world.job_spec(slots=4, parallel={"dp": 2, "tp": 2}, steps=1000))
    answer = elastic.rescale_preview(here.job(), slots, layout, here.state.fleet, frozenset())
    assert (answer.message if isinstance(answer, PlacementRefused) else answer.reason) == says


def test_standbys_are_raised_when_an_attempt_makes_its_first_step() -> None:
    here = World(FOUR)
    here.submit(job=world.spec(slots=2, steps=100, spares=1))
    here.start()
    (raised,) = here.steps(1, 2).commands
    assert isinstance(raised, RaiseStandbys)
    assert raised.placement.spares == (Slot("id1", "n1", 0), Slot("id1", "n1", 1))
    assert here.steps(3, 4).commands == ()


def test_spares_stand_in_other_racks_and_are_filled_when_a_node_comes() -> None:
    here = World(world.fleet(2, 1))
    here.submit(job=world.job_spec(resources={"device": "cpu", "slots": 2, "spares": 2}, parallel={"tp": 2}, steps=100))
    here.start()
    here.steps(1, 2)
    assert [slot.name for slot in here.job().placement.spares] == ["n2", "n2", "n1", "n1"]
    here.observe(world.without(here.state.fleet, "n2"))
    assert (here.job().phase, len(here.job().placement.spares)) == (Phase.RUNNING, 2)
    assert [line.type for line in here.records[-1:]] == ["SpareLost"]
    (raised,) = here.observe(world.fleet(2, 2)).commands
    assert {slot.name for slot in raised.placement.spares} == {"n1", "n2"}
    here.observe(world.without(here.state.fleet, "n0"))
    here.stopped()
    assert names(here) == ["n1", "n1"]
    assert {slot.name for slot in here.job().placement.spares} == {"n2"}


def test_a_job_that_waits_and_could_run_with_it_gets_the_spare() -> None:
    here = going(world.spec(slots=2, steps=100, spares=1), world.fleet(2))
    assert len(here.job().placement.spares) == 2
    here.submit("b", world.spec(slots=4))
    assert len(here.job().placement.spares) == 2  # it is of no use to that one
    here.cancel("b")
    decision = here.submit("c", world.spec(slots=2))
    assert [type(order) for order in decision.commands] == [RaiseStandbys, StartGang]
    assert (here.job().placement.spares, here.job("c").phase) == ((), Phase.PLACING)
    here.cancel("c")
    here.stopped("c")
    assert len(here.job().placement.spares) == 2


def test_a_job_that_could_not_run_keeps_no_spare_from_others_and_nobody_from_growing() -> None:
    here = going(bounded(slots=4, least=2, spares=1), world.fleet(3), LIMITS)
    here.submit("b", world.spec(slots=64))
    spare = here.job().placement.spares[0].name
    here.observe(world.without(here.state.fleet, spare))
    assert here.job().placement.spares == ()
    here.observe(back(here, spare, "idx"))
    here.tick(10)
    assert [slot.name for slot in here.job().placement.spares] == [spare, spare]


def test_f24_a_job_that_no_free_fleet_could_hold_holds_up_nobody() -> None:
    here = World(world.fleet(2))
    here.submit("a", world.spec(slots=8))
    here.submit("b", world.spec(slots=2))
    assert (here.job("a").phase, here.job("b").phase) == (Phase.QUEUED, Phase.PLACING)
    assert here.job("a").reason == "needs 8 slots; 4 of 4 are free; it would not fit if all were free"
