"""Cases that broke others, on hosts of a network: four sizes in one run, a controller and a head that die, a notice,
ports that are taken, racks that are cut off, two jobs and room for one. Each job ends as it would have in calm.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from service.contracts.job import Cause, Phase
from service.contracts.status import JobView
from tests.chaos import faults, invariants, job
from tests.chaos.fleet import Fleet
from tests.e2e.world import until

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.timeout(600)]

MOST, STEPS = 300, 100  # a quick machine does fifty a second, and a case needs some while its job runs
FIXED: dict[str, Any] = {"elastic": None, "spares": 0}
LONG_S = 240.0
FIRST = "h0"  # where a job's first rank is placed
HELD_S = 10.0  # that something of a job may be held after its end


def asked(steps: int = STEPS, resources: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Four replicas; the first steps are the same, however many there are."""
    return job.spec(steps, layout={"dp": 4}, train={"horizon": MOST}, resources=dict(resources))


def finished(fleet: Fleet, uid: str) -> JobView:
    def over() -> JobView | None:
        fleet.tend()
        view = fleet.client.get(uid)
        return view if view.phase.terminal else None

    view = until(over, f"end of {uid}", LONG_S)
    assert view.phase is Phase.SUCCEEDED, view.reason
    return view


def running(fleet: Fleet, uid: str, which: Callable[[JobView], bool] = lambda view: True, more: int = 1) -> JobView:
    """The job once it runs so and has made some steps more."""

    def there() -> JobView | None:
        fleet.tend()
        view = fleet.client.get(uid)
        assert not view.phase.terminal, f"{view.phase}: {view.reason}"
        return view if view.phase is Phase.RUNNING and which(view) else None

    step = until(there, f"running {uid}", LONG_S).status.progress.step

    def further() -> JobView | None:
        view = fleet.client.get(uid)
        assert not view.phase.terminal, f"over before the case: {view.reason}"
        return view if view.status.progress.step >= step + more else None

    return until(further, "more steps", LONG_S)


Losses = Mapping[int, float]


def losses(fleet: Fleet, spec: dict[str, Any]) -> Losses:
    view = finished(fleet, fleet.client.submit(spec).uid)
    assert view.status.attempt == 1
    return {row.step: row.model_dump()["loss"] for row in fleet.client.metrics(view.uid)}


def broken(fleet: Fleet, view: JobView, calm: Losses) -> list[str]:
    """What does not hold of a job that is over. `calm`: as many steps of the same, or more."""
    steps = view.status.progress.steps
    return invariants.same_run(fleet, view, {step: loss for step, loss in calm.items() if step <= steps})


@pytest.fixture(scope="module")
def calm(fleet: Fleet) -> Losses:
    return losses(fleet, asked(MOST))


def test_f1_a_rank_dies_at_start_in_a_load_and_in_a_save(fleet: Fleet, calm: Losses) -> None:
    def kill(when: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_S
        while not when():
            assert time.monotonic() < deadline, "it did not come to that"
            time.sleep(0.005)
        victim = until(lambda: faults.ranks(fleet, fleet.client.get(uid)), "ranks")[0]
        os.kill(victim.pid, signal.SIGKILL)

    def saving() -> bool:
        """A shard is in storage, and its checkpoint is not published."""
        shards = {path.parents[1].name for path in (fleet.storage / uid).glob("checkpoints/*/*/*")}
        return bool(shards - {path.name.partition("-")[0] for path in (fleet.storage / uid).glob("manifests/*")})

    uid = fleet.client.submit(asked(MOST)).uid
    kill(lambda: fleet.client.get(uid).phase is Phase.PLACING)  # nobody was at work: no incident
    first = running(fleet, uid).status.attempt
    kill(lambda: True)
    kill(lambda: (view := fleet.client.get(uid)).phase is Phase.STARTING and view.status.attempt == first + 1)
    running(fleet, uid, lambda view: view.status.attempt == first + 2)
    kill(saving)
    view = finished(fleet, uid)
    assert not broken(fleet, view, calm)
    assert not invariants.nothing_left(fleet, [view.storage])
    assert view.status.attempt == first + 3
    assert [one.kind for one in view.status.incidents] == ["process_died"] * 3


def test_f4_four_sizes_in_one_run(fleet: Fleet, calm: Losses) -> None:
    uid = fleet.client.submit(asked(MOST)).uid
    running(fleet, uid)
    for slots in (3, 2, 4):
        assert fleet.client.rescale(uid, slots).possible
        running(fleet, uid, lambda view, slots=slots: len(view.status.placement) == slots)  # type: ignore[misc]
    view = finished(fleet, uid)
    assert not broken(fleet, view, calm)
    assert [one.steps_redone for one in view.status.incidents] == [0, 0, 0]
    assert {one.cause for one in view.status.incidents} == {None}


def end_controller(fleet: Fleet) -> None:
    """Kills it, and waits for the one that comes after it."""
    (controller,) = fleet.processes("ray::Controller")
    os.kill(controller.pid, signal.SIGKILL)
    until(lambda: controller.pid not in fleet.net.pids(controller.host), "end of the controller")
    until(lambda: fleet.processes("ray::Controller"), "next controller", LONG_S)


def end_controller_in(fleet: Fleet, uid: str, phase: Phase) -> None:
    deadline = time.monotonic() + LONG_S
    while (view := fleet.client.get(uid)).phase is not phase:
        assert not view.phase.terminal, f"{phase} was not seen: {view.reason}"
        assert time.monotonic() < deadline, f"no {phase}: {view.reason}"
        time.sleep(0.02)
    end_controller(fleet)


def ended_well(fleet: Fleet, uid: str, calm: Losses) -> JobView:
    """The job as it ends, which is as in calm, and with nothing left."""
    view = finished(fleet, uid)
    until(lambda: not any(group.startswith(view.uid) for group in fleet.inventory()["groups"]), "free slots", HELD_S)
    assert not broken(fleet, view, calm)
    assert not invariants.nothing_left(fleet, [view.storage])
    return view


# Training goes on while there is no controller: a job that waited for one at each of seven deaths would be over before
# the last. So one job has them until it is at work, one as it moves, and one as it recovers and ends; who moves works
# slowly until it does.


def test_f5_the_controller_dies_until_a_job_is_at_work(fleet: Fleet, calm: Losses) -> None:
    over = {view.uid: view for view in fleet.client.list()}
    end_controller(fleet)
    uid = fleet.client.submit(asked(MOST, {"probe": True})).uid
    for phase in (Phase.PLACING, Phase.STARTING, Phase.RUNNING):
        end_controller_in(fleet, uid, phase)
    view = ended_well(fleet, uid, calm)
    assert [one.kind for one in view.status.incidents].count("process_died") == 0, view.status.incidents
    assert {view.uid: view for view in fleet.client.list()} == over | {uid: view}  # what was over stayed so


def test_f5_the_controller_dies_while_a_job_moves(fleet: Fleet, calm: Losses) -> None:
    uid = fleet.client.submit(asked(MOST)).uid
    with faults.slowed(faults.ranks(fleet, running(fleet, uid))):
        assert fleet.client.rescale(uid, 3).possible
        end_controller_in(fleet, uid, Phase.RESCALING)
        until(lambda: fleet.client.get(uid).status.attempt > 1, "another attempt", LONG_S)
    running(fleet, uid, lambda view: len(view.status.placement) == 3)
    view = ended_well(fleet, uid, calm)
    assert {one.cause for one in view.status.incidents} == {None}


def test_f5_the_controller_dies_while_a_job_recovers_and_as_it_ends(fleet: Fleet, calm: Losses) -> None:
    uid = fleet.client.submit(asked(MOST)).uid
    os.kill(faults.ranks(fleet, running(fleet, uid))[0].pid, signal.SIGKILL)
    for phase in (Phase.RECOVERING, Phase.FINISHING):
        end_controller_in(fleet, uid, phase)
    view = ended_well(fleet, uid, calm)
    assert [one.kind for one in view.status.incidents if one.cause is not None] == ["process_died"]


def test_f6_the_head_dies_and_comes_back_with_redis(fleet: Fleet, calm: Losses) -> None:
    if not fleet.redis:
        pytest.skip("redis-server is not installed")
    uid = fleet.client.submit(asked()).uid
    before = running(fleet, uid, more=10)
    fleet.lose_head()
    events = len(list(fleet.client.events(uid)))  # the API needs no head
    until(lambda: not fleet.processes("gcs_server", "head"), "end of the head")
    fleet.start_head()
    view = finished(fleet, uid)
    assert not broken(fleet, view, calm)
    assert view.status.attempt <= before.status.attempt + 1
    assert len(list(fleet.client.events(uid))) > events
    assert [line for line in fleet.client.logs(uid) if line.text.startswith(f"step {STEPS} ")]


def test_f6_the_head_dies_and_another_one_comes_that_knows_nothing(tmp_path: Path, calm: Losses) -> None:
    with Fleet(tmp_path, hosts=2, spares=0) as forgetful:
        spec = asked(resources=FIXED)
        uid = forgetful.client.submit(spec).uid
        before = running(forgetful, uid, more=25)
        with faults.slowed(faults.ranks(forgetful, before)):  # they would be over before the head is
            events, logs = list(forgetful.client.events(uid)), list(forgetful.client.logs(uid))
            forgetful.lose_head()
            until(lambda: not forgetful.processes("gcs_server", "head"), "end of the head")
            forgetful.start_head()
            running(forgetful, uid, lambda view: view.status.attempt > before.status.attempt, more=0)
        view = finished(forgetful, uid)
        assert not broken(forgetful, view, calm)
        assert view.status.attempt == before.status.attempt + 1
        assert list(forgetful.client.events(uid))[: len(events)] == events
        assert list(forgetful.client.logs(uid))[: len(logs)] == logs


@pytest.mark.parametrize("way", ["notice", "SIGTERM"])
def test_f9_a_node_with_notice_is_left_before_it_goes_and_f13_ranks_meet_where_ports_are_taken(
    fleet: Fleet, calm: Losses, way: str
) -> None:
    if way == "SIGTERM":
        fleet.lose(FIRST)
        until(lambda: FIRST not in {node.name for node in fleet.client.nodes()}, "end of the node", LONG_S)
        fleet.join(FIRST, grace_s=30)
        until(lambda: {node.name for node in fleet.client.nodes() if not node.barred} == fleet.up, "fleet", LONG_S)
    uid = fleet.client.submit(asked()).uid
    host = running(fleet, uid).status.placement[0].node
    assert host == FIRST
    given = time.monotonic()
    if way == "notice":
        fleet.notice(host, 30)
    else:
        fleet.terminate(host)
    with contextlib.ExitStack() as taken:
        for other in fleet.up - {host}:
            taken.enter_context(fleet.net.few_ports(other))
        running(fleet, uid, lambda view: host not in faults.hosts_of(view), more=0)
        assert time.monotonic() - given < 30
    fleet.lose(host)
    view = finished(fleet, uid)
    assert not broken(fleet, view, calm)
    (incident,) = [one for one in view.status.incidents if one.cause is not None]
    assert (incident.cause, incident.kind, incident.node) == (Cause.PREEMPTION, "preempted", host)
    assert incident.steps_redone == 0
    assert not [event for event in fleet.client.events(uid) if event.type == "GangRefused"]


def test_f20_racks_that_are_cut_off_from_each_other(fleet: Fleet) -> None:
    spec = job.spec(40, slots=8, layout={"dp": 8})
    calm = losses(fleet, spec)
    uid = fleet.client.submit(spec).uid
    before = running(fleet, uid)
    assert {fleet.rack_of[host] for host in faults.hosts_of(before)} == set(fleet.racks)
    fleet.net.partition("r0")
    there = running(fleet, uid, lambda view: view.status.attempt > before.status.attempt)
    assert {fleet.rack_of[host] for host in faults.hosts_of(there)} == {"r1"}
    fleet.net.rejoin("r0")
    view = finished(fleet, uid)
    assert not broken(fleet, view, calm)  # who was alone published nothing, and told nothing
    assert not invariants.nothing_left(fleet, [view.storage])


def test_f23_two_jobs_lose_a_node_each_and_there_is_room_for_one(fleet: Fleet, calm: Losses) -> None:
    spec = asked(STEPS, FIXED)
    uids = [fleet.client.submit(spec).uid for _ in range(2)]
    for host in [faults.hosts_of(running(fleet, uid))[0] for uid in uids]:
        fleet.lose(host)

    def parted() -> list[JobView]:
        views = [fleet.client.get(uid) for uid in uids]
        ready = {view.phase for view in views} == {Phase.RUNNING, Phase.RECOVERING}
        return sorted(views, key=lambda view: view.phase) if ready and "slots" in _waits(views) else []

    waits, runs = until(parted, "one job that runs and one that waits", LONG_S)
    assert waits.phase is Phase.RECOVERING
    assert not waits.status.holds_slots
    assert {group.partition("/")[0] for group in fleet.inventory()["groups"]} == {runs.uid}
    for host in fleet.rack_of.keys() - fleet.up:
        fleet.join(host)
    for uid in uids:
        assert not broken(fleet, finished(fleet, uid), calm)


def _waits(views: list[JobView]) -> str:
    return next(view.reason for view in views if view.phase is Phase.RECOVERING)
