from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from service.contracts.events import Fault
from service.contracts.job import Cause, Phase
from service.core import incidents, recovery
from service.core.state import Job
from tests.service.core import world

USER, INFRA, HANG = Cause.USER_ERROR, Cause.INFRASTRUCTURE, Cause.HANG


def running(step: int = 5, **fields: int) -> Job:
    spec = world.spec(budgets=tuple(fields.items()))
    return Job("a", 1, spec, 0.0, Phase.RUNNING, attempt=1, step=step, high_step=step, progress_at=90.0)


def broken(job: Job, faults: list[Fault], at: float) -> tuple[Job, recovery.Verdict]:
    """The job as the next attempt finds it, at the same step."""
    verdict = recovery.judge(job, faults, at)
    incident = incidents.opened(job, verdict, faults, at)
    charges = recovery.charge(job.charges, verdict.cause, at)
    after = dataclasses.replace(job, attempt=job.attempt + 1, incidents=(*job.incidents, incident), charges=charges)
    return after, verdict


@pytest.mark.parametrize(
    ("kinds", "root"),
    [
        (["peer"], "peer"),
        (["user"], "user"),
        (["peer", "code", "user"], "code"),
        (["peer", "user"], "user"),
        (["user", "process_died"], "process_died"),
        (["peer", "process_died", "node_lost"], "node_lost"),
        (["gang_lost", "process_died"], "process_died"),
        (["hang", "gang_lost"], "gang_lost"),
        (["numeric", "hang"], "hang"),
        (["user", "numeric"], "numeric"),
        (["numeric", "drift"], "drift"),
        (["drift", "process_died"], "process_died"),
        (["peer", "corruption"], "corruption"),
        (["user", "start_failed"], "start_failed"),
    ],
)
def test_the_root_is_blamed_not_its_echoes(kinds: list[str], root: str) -> None:
    faults = [Fault(kind, f"{index}") for index, kind in enumerate(kinds)]
    assert recovery.blame(faults).kind == root
    assert recovery.blame(faults[::-1]).kind == root


def test_of_equal_faults_the_first_is_blamed() -> None:
    assert recovery.blame([Fault("peer", "x"), Fault("user", "one"), Fault("user", "two")]).message == "one"


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("node_lost", INFRA), ("process_died", INFRA), ("gang_lost", INFRA), ("peer", INFRA),
     ("start_failed", INFRA), ("hang", HANG), ("numeric", USER), ("drift", INFRA), ("corruption", INFRA),
     ("user", USER), ("code", USER)],
)  # fmt: skip
def test_cause(kind: str, cause: Cause) -> None:
    assert recovery.cause_of(Fault(kind, "")) is cause


@pytest.mark.parametrize(
    ("cause", "waits"),
    [(INFRA, [0, 1, 2, 4, 8, 16, 32, 60, 60]), (HANG, [0, 1, 2]), (USER, [1, 2, 4, 8, 16, 32, 60, 60])],
)
def test_backoff(cause: Cause, waits: list[float]) -> None:
    assert [recovery.backoff(cause, before) for before in range(len(waits))] == waits


def test_backoff_starts_anew_after_a_new_step() -> None:
    job, verdict = broken(running(), [Fault("process_died", "one")], 100.0)
    assert verdict.not_before == 100.0
    job, verdict = broken(job, [Fault("process_died", "two")], 200.0)
    assert verdict.not_before == 201.0
    job = dataclasses.replace(job, incidents=incidents.closed(job.incidents, job.attempt, 210.0))
    assert recovery.judge(job, [Fault("process_died", "three")], 300.0).not_before == 300.0


@pytest.mark.parametrize(("budget", "survived"), [(0, 0), (1, 1), (3, 3)])
def test_a_budget_is_what_a_job_survives(budget: int, survived: int) -> None:
    job, verdicts = running(user_error=budget), []
    for number in range(budget + 1):
        job, verdict = broken(job, [Fault("user", f"error {number}")], 100.0 + number)
        verdicts.append(verdict.restart)
    assert verdicts == [True] * survived + [False]
    assert verdict.reason.endswith(f"user_error fault {budget + 1} within an hour, the budget is {budget}")


def test_a_budget_of_minus_one_has_no_bound() -> None:
    job = running(infrastructure=-1)
    for number in range(200):
        job, verdict = broken(job, [Fault("process_died", f"error {number}")], 100.0)
        assert verdict.restart
    assert verdict.reason.endswith("restarts after 60 s, infrastructure fault 200 within an hour")


def test_charges_are_by_cause_and_age_out() -> None:
    job = running(user_error=1)
    job, _ = broken(job, [Fault("process_died", "infra")], 100.0)
    job, first = broken(job, [Fault("user", "one")], 200.0)
    assert first.restart
    assert not recovery.judge(job, [Fault("user", "two")], 3799.0).restart
    assert recovery.judge(job, [Fault("user", "two")], 3800.0).restart
    assert recovery.charge(job.charges, USER, 3750.0) == ((USER, 200.0), (USER, 3750.0))


@pytest.mark.parametrize(
    ("third", "restart"),
    [
        (Fault("user", "ValueError: bad\nother detail", rank=7), False),
        (Fault("user", "ValueError: other"), True),
        (Fault("numeric", "ValueError: bad"), True),
        (Fault("user", "ValueError: bad", step=9), True),
    ],
)
def test_f7_the_same_root_at_the_same_step_three_times_is_no_progress(third: Fault, restart: bool) -> None:
    job = running(user_error=-1)
    for at in (100.0, 200.0):
        job, verdict = broken(job, [Fault("peer", "reset"), Fault("user", "ValueError: bad", rank=1)], at)
        assert verdict.restart
    verdict = recovery.judge(job, [third], 300.0)
    assert verdict.restart is restart
    if not restart:
        assert verdict.reason == "no_progress: 3 times at the same step: user on rank 7 after step 5: ValueError: bad"


@pytest.mark.parametrize("kind", ["numeric", "drift"])
@pytest.mark.parametrize(
    ("third", "restart"), [({"message": "NonFinite: loss inf", "rank": 7}, False), ({"message": "", "step": 9}, True)]
)
def test_figures_and_places_make_no_other_numeric_fault(kind: str, third: dict[str, Any], restart: bool) -> None:
    job = running(user_error=-1)
    for number in range(2):
        job, verdict = broken(job, [Fault(kind, f"NonFinite: loss nan in stage {number}", rank=number)], 100.0)
        assert verdict.restart
    assert recovery.judge(job, [Fault(kind, **third)], 300.0).restart is restart


def test_a_storage_outage_is_waited_for_and_no_lack_of_progress() -> None:
    job = running()
    for at in (100.0, 200.0, 300.0, 400.0):
        job, verdict = broken(job, [Fault("storage", "OSError: away", rank=1)], at)
        assert verdict.restart


def test_the_same_root_at_later_steps_is_progress() -> None:
    job = running(user_error=-1)
    for step in (5, 6, 7):
        job, verdict = broken(dataclasses.replace(job, step=step), [Fault("user", "ValueError: bad")], 100.0)
        assert verdict.restart


@pytest.mark.parametrize(
    ("kind", "at"), [("process_died", 100.0), ("user", 100.0), ("hang", 90.0), ("node_lost", 90.0)]
)
def test_a_silent_fault_happened_at_the_last_progress(kind: str, at: float) -> None:
    assert recovery.faulted_at(Fault(kind, ""), progress_at=90.0, at=100.0) == at


def test_faults_far_apart_at_one_step_are_no_lack_of_progress_once_steps_lie_between() -> None:
    job = running(step=5)
    for at in (100.0, 200.0, 300.0, 400.0):
        job, verdict = broken(job, [Fault("process_died", "killed by signal 9")], at)
        assert verdict.restart
        job = dataclasses.replace(job, incidents=incidents.closed(job.incidents, job.attempt, at + 5))


@pytest.mark.parametrize("kind", ["node_lost", "preempted", "gang_lost", "storage"])
def test_what_passes_is_no_lack_of_progress(kind: str) -> None:
    job = running(preemption=-1)
    for at in (100.0, 200.0, 300.0, 400.0):
        job, verdict = broken(job, [Fault(kind, "gone", node="n0")], at)
        assert verdict.restart


def test_the_state_that_leads_there_is_passed_over_once() -> None:
    job, verdicts = dataclasses.replace(running(user_error=-1), resumed_step=4), []
    for at in (100.0, 200.0, 300.0, 400.0):
        job, verdict = broken(job, [Fault("user", "ValueError: bad")], at)
        verdicts.append((verdict.restart, verdict.quarantine))
        job = dataclasses.replace(job, quarantined=job.quarantined or verdict.quarantine)
    assert verdicts == [(True, False), (True, False), (True, True), (False, False)]


def test_f22_budgets_of_user_errors_losses_and_preemptions_are_counted_apart() -> None:
    job = running(user_error=5, infrastructure=5, preemption=5)
    for number in range(5):
        for kind in ("user", "node_lost", "preempted"):
            job, verdict = broken(job, [Fault(kind, f"{kind} {number}")], 100.0 + number)
            assert verdict.restart
    for kind, cause in (("user", USER), ("node_lost", INFRA), ("preempted", Cause.PREEMPTION)):
        assert f"; {cause} fault 6 within an hour" in recovery.judge(job, [Fault(kind, "six")], 200.0).reason


def test_code_that_can_t_be_loaded_is_not_tried_again() -> None:
    verdict = recovery.judge(running(), [Fault("code", "no module mine"), Fault("peer", "gone")], 100.0)
    assert (verdict.restart, verdict.cause) == (False, Cause.USER_ERROR)
    assert "no module mine; another try would end the same" in verdict.reason
