"""Durations of a recovery: given, and measured from a job's incidents."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from service.contracts import events
from service.contracts.errors import UserError
from service.contracts.job import Cause, Phase
from service.contracts.status import IncidentView, JobStatus, JobView, Progress
from service.sim import clock, phases, simulate
from service.sim.phases import Phases
from service.sim.stretch import Stall
from tests.service.core import world as core
from tests.service.sim import world


def incident(kind: str, detect_s: float, recover_s: float | None, redone: int = 0) -> IncidentView:
    return IncidentView(
        number=1, attempt=1, cause=Cause.INFRASTRUCTURE, kind=kind, message="", rank=None, node=None, step=5,
        faulted_at=0, detect_s=detect_s, recover_s=recover_s, steps_redone=redone, action="",
    )  # fmt: skip


def document(*incidents: IncidentView, step_s: float = 2) -> Any:
    status = JobStatus(progress=Progress(step=50, steps=100), productive_s=50 * step_s, incidents=incidents)
    view = JobView(
        uid="a", name="a", phase=Phase.RUNNING, reason="", created_at=0, ended_at=None, cancel_requested=False,
        goodput=1, storage="", status=status, spec={},
    )  # fmt: skip
    return view.model_dump(mode="json")


def test_durations_are_medians_of_what_was_seen() -> None:
    """Steps of 2 s. Processes: known 1.5, 2.5, 9 s after the last step, 1 s before the fault; first new step 7, 10,
    11 s after that, of which 2 s are a step, and 4 more where two steps were done again. A node: known 6 s after the
    last step, and 16 s after that a new one."""
    seen = [
        incident("process_died", 1.5, 7), incident("process_died", 2.5, 10, redone=2), incident("peer", 9, 11),
        incident("node_lost", 6, 16), incident("process_died", 100, None),
    ]  # fmt: skip
    found = phases.measured(document(*seen), Phases(load_storage_s=77))
    assert (found.detect_process_s, found.detect_node_s) == (1.5, 5)
    assert found.start_s == (5 + 8) / 2  # of 5, 4, 9, 8
    assert (found.stop_s, found.load_s(1000, from_memory=True), found.load_s(1000, from_memory=False)) == (0, 0, 0)


def test_what_is_measured_of_a_simulation_is_what_it_was_given() -> None:
    """Faults in the middle of a step: there half a step is what detection counts too much."""
    given = world.scenario(
        [world.process(0, at) for at in (111, 305)], 600, nodes=5, snapshot=Stall(1, 0),
        phases=dataclasses.replace(world.PHASES, load_storage_s=2),
    )  # fmt: skip
    result = simulate.run(given)
    views = [incident(one.kind, one.detect_s, one.recover_s, one.steps_redone or 0) for one in result.job.incidents]
    assert len(views) == 2
    found = phases.measured(document(*views, step_s=10), Phases())
    assert found.start_s == pytest.approx(1 + 4 + 2)
    assert found.detect_process_s == pytest.approx(2)


@pytest.mark.parametrize(
    ("value", "says"),
    [({}, "not a job"), (document(), "no incident"), (document(incident("peer", 1, None)), "no incident")],
)
def test_a_job_that_shows_nothing_is_refused(value: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        phases.measured(value, Phases())


def test_phases_are_changed_by_name() -> None:
    assert phases.changed(Phases(), ["stop_s=3", "start_s=0"]) == Phases(stop_s=3, start_s=0)
    for wrong in ("speed=1", "stop_s", "stop_s=-1", "stop_s=nan", "stop_s=x"):
        with pytest.raises(UserError):
            phases.changed(Phases(), [wrong])


def test_a_start_of_cold_processes_is_within_the_cores_limits() -> None:
    """Else the service would give up attempts that these durations say are well."""
    slow = Phases()
    ranks = 16_384
    world_ = core.World(core.fleet(1))
    world_.submit()
    world_.tick(slow.start_s)
    world_.gang(events.GangStarted)
    world_.tick(slow.load_s(ranks, from_memory=False))
    assert world_.job().phase is Phase.STARTING
    assert clock.us(slow.start_s) == 19_500_000
    assert slow.with_standbys().start_s == phases.STANDBY_START_S
