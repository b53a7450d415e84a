"""Cases that broke others, on hosts of a network: four sizes in one run, a head that dies, two jobs and room for one.
Each job ends as it would have in calm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from service.contracts.job import Phase
from service.contracts.status import JobView
from tests.chaos import faults, invariants, job
from tests.chaos.fleet import Fleet
from tests.e2e.world import until

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.timeout(600)]

STEPS = 300  # a quick machine does fifty a second, and a case needs some while its job runs
SPEC = job.spec(STEPS, layout={"dp": 4})
FIXED: dict[str, Any] = {"elastic": None, "spares": 0}
LONG_S = 240.0


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


@pytest.fixture(scope="module")
def calm(fleet: Fleet) -> Mapping[int, float]:
    view = finished(fleet, fleet.client.submit(SPEC).uid)
    assert view.status.attempt == 1
    return {row.step: row.model_dump()["loss"] for row in fleet.client.metrics(view.uid)}


@pytest.fixture(autouse=True)
def whole(fleet: Fleet) -> Iterator[None]:
    """A test leaves the fleet as it found it."""
    yield
    for host in fleet.rack_of.keys() - fleet.up:
        fleet.join(host)
    until(lambda: not fleet.tend() and {node.name for node in fleet.client.nodes()} == fleet.up, "whole fleet", LONG_S)


def test_f4_four_sizes_in_one_run(fleet: Fleet, calm: Mapping[int, float]) -> None:
    uid = fleet.client.submit(SPEC).uid
    running(fleet, uid)
    for slots in (3, 2, 4):
        assert fleet.client.rescale(uid, slots).possible
        running(fleet, uid, lambda view, slots=slots: len(view.status.placement) == slots)  # type: ignore[misc]
    view = finished(fleet, uid)
    assert not invariants.same_run(fleet, view, calm)
    assert [one.steps_redone for one in view.status.incidents] == [0, 0, 0]
    assert {one.cause for one in view.status.incidents} == {None}


def test_f6_the_head_dies_and_comes_back_with_redis(fleet: Fleet, calm: Mapping[int, float]) -> None:
    if not fleet.redis:
        pytest.skip("redis-server is not installed")
    uid = fleet.client.submit(SPEC).uid
    before = running(fleet, uid, more=10)
    fleet.lose_head()
    events = len(list(fleet.client.events(uid)))  # the API needs no head
    until(lambda: not fleet.processes("gcs_server", "head"), "end of the head")
    fleet.start_head()
    view = finished(fleet, uid)
    assert not invariants.same_run(fleet, view, calm)
    assert view.status.attempt <= before.status.attempt + 1
    assert len(list(fleet.client.events(uid))) > events
    assert [line for line in fleet.client.logs(uid) if line.text.startswith(f"step {STEPS} ")]


def test_f23_two_jobs_lose_a_node_each_and_there_is_room_for_one(fleet: Fleet, calm: Mapping[int, float]) -> None:
    spec = job.spec(STEPS, layout={"dp": 4}, resources=FIXED)
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
        assert not invariants.same_run(fleet, finished(fleet, uid), calm)


def _waits(views: list[JobView]) -> str:
    return next(view.reason for view in views if view.phase is Phase.RECOVERING)
