"""Ranks, incidents and goodput of a job, as its controller left them."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from service.contracts import events
from service.contracts.job import parse_job
from service.core import codec, machine
from service.core.state import Job, State
from service.store.records import JobUpdate, TimesRow
from tests.api.world import World, job
from tests.service.core import world as core

LAYOUT = {"parallel": {"dp": 2, "tp": 2}, "train.steps": 100}


def written(world: World, uid: str, made: Job) -> None:
    """As the controller would."""
    from service.core.status import status

    told = status(made).model_dump(mode="json")
    world.commit(jobs=[JobUpdate(uid, made.phase.value, made.reason, told, codec.dump(made), made.ended_at)])


def going(world: World) -> tuple[str, core.World]:
    """A job at work whose rank 1 died once, with its core's state in the store."""
    uid = world.submit(LAYOUT).uid
    here = core.World(core.fleet(2))
    here.now = time.time() - 1000
    here.tell(events.JobSubmitted(uid, 1, parse_job(job(LAYOUT)), here.now - 3))
    here.start(uid)
    here.steps(1, 4, uid)
    here.gang(events.GangFaulted, uid, faults=(events.Fault("process_died", "gone", 1, "n0", 4, "stack of 1"),))
    here.stopped(uid)
    here.now += 1
    here.start(uid, resumed=3)
    here.steps(4, 6, uid)
    written(world, uid, here.job(uid))
    return uid, here


def test_ranks_have_a_place_and_coordinates(world: World) -> None:
    uid, _ = going(world)
    with world.client() as client, world.fleet(2, 2):
        found = client.ranks(uid)
    assert (found.attempt, found.layout.world) == (2, 4)
    assert [(one.rank, one.node, one.slot, one.pp, one.dp, one.tp) for one in found.ranks] == [
        (0, "n0", 0, 0, 0, 0), (1, "n0", 1, 0, 0, 1), (2, "n1", 0, 0, 1, 0), (3, "n1", 1, 0, 1, 1),
    ]  # fmt: skip


def test_ranks_have_the_parts_of_a_step(world: World) -> None:
    uid, _ = going(world)
    parts = {"data": [0.1, 0.1, None, 0.2], "optimizer": [0.3, 0.3, None, 0.3], "pulse": [0.01, 0.01, None, 0.02]}
    older = TimesRow(uid, 50.0, 2, 5, {"data": [9.0] * 4})
    world.commit(times=[older, TimesRow(uid, 60.0, 2, 6, parts), TimesRow(uid, 70.0, 1, 4, {"data": [9.0] * 4})])
    with world.client() as client:
        found = client.ranks(uid)
    assert (found.attempt, found.step, found.at) == (2, 6, 60.0)
    first, _, silent, last = found.ranks
    assert (first.parts, first.pulse_s) == ({"data": 0.1, "optimizer": 0.3}, 0.01)
    assert first.step_s == pytest.approx(0.4)
    assert (silent.parts, silent.step_s, silent.pulse_s) == ({}, None, None)
    assert last.step_s == pytest.approx(0.5)


def test_incidents_have_their_evidence(world: World) -> None:
    uid, _ = going(world)
    with world.client() as client:
        (found,) = client.incidents(uid)
    assert (found.incident.kind, found.incident.rank, found.incident.steps_redone) == ("process_died", 1, 1)
    assert [(one.message, one.traceback) for one in found.faults] == [("gone", "stack of 1")]


def test_a_jobs_time_adds_up(world: World) -> None:
    uid, here = going(world)
    with world.client() as client:
        told = client.goodput(uid).model_dump()
    share, elapsed = told.pop("goodput"), told.pop("elapsed_s")
    assert sum(told.values()) == pytest.approx(elapsed)
    assert (told["productive_s"], told["redone_s"]) == (6 * core.STEP_S, core.STEP_S)
    assert share == pytest.approx(told["productive_s"] / elapsed)
    assert min(told.values()) >= 0.0
    assert here.now - here.job(uid).submitted_at <= elapsed


def test_a_job_that_nobody_took_up_has_only_waited(world: World) -> None:
    uid = world.submit().uid
    with world.client() as client:
        assert client.ranks(uid).ranks == ()
        assert client.incidents(uid) == ()
        told = client.goodput(uid)
    assert (told.goodput, told.place_s) == (0.0, told.elapsed_s)


@pytest.mark.parametrize("what", ["ranks", "incidents", "goodput"])
def test_of_another_versions_job_nothing_is_told_that_is_not_known(http: httpx.Client, world: World, what: str) -> None:
    uid = world.submit().uid
    broken: dict[str, Any] = {"uid": uid, "phase": "dancing"}
    row = world.store.job(uid)
    world.commit(jobs=[JobUpdate(uid, "queued", "", row.status, broken)])
    answer = http.get(f"/v1/jobs/{uid}/{what}")
    assert (answer.status_code, answer.json()["reason"]) == (503, "cluster")


def test_what_the_status_says_of_a_job_that_waits(world: World) -> None:
    uid = world.submit().uid
    state = State()
    decided = machine.decide(state, events.JobSubmitted(uid, 1, parse_job(job()), time.time()))
    written(world, uid, decided.state.jobs[uid])
    with world.client() as client:
        view = client.get(uid)
    assert (view.status.position, view.status.observed_generation, view.generation) == (1, 1, 1)
    admitted = next(one for one in view.status.conditions if one.type == "Admitted")
    assert (admitted.status, admitted.reason) == (False, "Pending")
    assert admitted.message == view.reason
    assert view.reason == "needs 4 slots; the fleet has no cpu node; it would not fit if all were free"
