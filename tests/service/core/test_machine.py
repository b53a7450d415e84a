from __future__ import annotations

import itertools
import typing

import pytest

from service.contracts import events
from service.contracts.cluster import Fleet
from service.contracts.job import Cause, Phase
from service.core import codec, liveness, machine
from service.core.commands import InspectGang, RaiseStandbys, StartGang, StopGang
from service.core.state import Restored
from tests.service.core import world
from tests.service.core.world import World

EVENTS = (
    events.JobSubmitted,
    *typing.get_args(events.Request),
    *typing.get_args(events.GangEvent),
    *typing.get_args(events.CheckpointFact),
    events.FleetObserved,
    events.HealthFound,
    events.Ticked,
)
GANG_EVENTS = typing.get_args(events.GangEvent)
FACTS = typing.get_args(events.CheckpointFact)
M8 = {"step": 8, "manifest": "m8"}
FACT_FIELDS = {
    events.CheckpointRejected: {"attempt": 1, "manifest": "m8", "reason": "checksum"},
    events.CheckpointVerified: {"attempt": 1, **M8},
    events.CheckpointCheckFailed: {**M8, "reason": "timed out"},
    events.CheckpointExported: {**M8, "to": "/out"},
    events.CheckpointExportFailed: {**M8, "to": "/out", "reason": "not empty"},
}
FIELDS = {
    events.GangRefused: {"reason": "no room"},
    events.GangResumed: {"step": 4, "manifest": "m4"},
    events.StepsRecalled: {"steps": ((1, world.step(4, 1000.0)),)},
    events.StepsCompleted: {"steps": (world.step(5, 1000.0),)},
    events.GangFaulted: {"faults": (events.Fault("process_died", "gone", rank=0),)},
    events.CheckpointPublished: {"step": 4, "manifest": "m4"},
    events.GangPaused: {"step": 5},
    events.SaveFailed: {"step": 4, "reason": "disk full"},
    events.SaveDelayed: {"step": 4, "reason": "no answer"},
    events.SnapshotHeld: {"step": 5, "nbytes": 4096},
    events.SnapshotFailed: {"step": 5, "reason": "no room"},
    events.SnapshotRefused: {"step": 5, "reason": "block 3 fails its checksum"},
    events.StepSkipped: {"step": 5, "action": "skip", "reason": "loss nan", "samples": (64, 65)},
    events.StandbysWarm: {"warm": 8},
    events.StragglerFound: {"node": "n0", "rank": 1, "ranks": 1, "factor": 2.0},
    events.Evaluated: {"step": 4, "loss": 2.5, "tokens": 4096},
    events.LossSpiked: {"step": 4, "loss": 9.5, "usual": 2.5, "bound": 3.0, "samples": (64, 80)},
}
Q, PL, ST, RU = Phase.QUEUED, Phase.PLACING, Phase.STARTING, Phase.RUNNING
RS, RE, FI, CA = Phase.RESCALING, Phase.RECOVERING, Phase.FINISHING, Phase.CANCELLING
SI, SU = Phase.SUSPENDING, Phase.SUSPENDED
OK, BAD, GONE = Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED

ILLEGAL = {
    *itertools.product([Q, SU], [events.GangStarted, events.GangResumed, events.StepsCompleted, events.GangFinished]),
    *itertools.product([Q, SU], [events.StepSkipped, events.Evaluated, events.LossSpiked, events.StepsRecalled]),
    *itertools.product([PL, ST, RU], [events.GangStopped]),
    *itertools.product([ST, RU, RS], [events.GangRefused]),
    *itertools.product([Q, SU, PL, ST, RU], [events.GangPaused]),
}


@pytest.mark.parametrize("pair", list(itertools.product(Phase, EVENTS)), ids=str)
def test_every_pair_is_ruled_ignored_or_illegal(pair: tuple[Phase, type]) -> None:
    assert (pair in machine.TABLE) + (pair in machine.IGNORED) + (pair in ILLEGAL) == 1


@pytest.mark.parametrize(("phase", "kind"), sorted(ILLEGAL, key=str))
def test_an_illegal_pair_names_phase_event_and_job(phase: Phase, kind: type) -> None:
    here = World(world.fleet(1))
    here.bring(phase)
    with pytest.raises(machine.IllegalTransition, match=f"{kind.__name__} can't happen to job a in phase {phase}"):
        here.gang(kind, **FIELDS.get(kind, {}))


@pytest.mark.parametrize(("phase", "kind"), sorted(itertools.product(Phase, GANG_EVENTS), key=str))
def test_late_messages_of_an_old_attempt_are_dropped(phase: Phase, kind: type) -> None:
    here = World(world.fleet(1))
    before = here.bring(phase)
    decision = here.gang(kind, attempt=before.attempt - 1, **FIELDS.get(kind, {}))
    assert (here.job(), decision.commands, decision.records) == (before, (), ())


STOP, START, RAISE, NONE = (StopGang,), (StartGang,), (RaiseStandbys,), ()


@pytest.mark.parametrize(
    ("phase", "kind", "then", "commands", "record"),
    [
        (PL, events.GangStarted, ST, NONE, "JobStarted"),
        (PL, events.GangRefused, Q, NONE, "GangRefused"),
        (PL, events.GangResumed, PL, NONE, "GangResumed"),
        (PL, events.StepsCompleted, RU, RAISE, "JobRunning"),
        (PL, events.GangFaulted, RE, STOP, "IncidentOpened"),
        (PL, events.GangFinished, FI, STOP, "JobFinishing"),
        (ST, events.StepsCompleted, RU, RAISE, "JobRunning"),
        (ST, events.GangFaulted, RE, STOP, "IncidentOpened"),
        (ST, events.GangFinished, FI, STOP, "JobFinishing"),
        (RU, events.StepsCompleted, RU, NONE, None),
        (RU, events.GangFaulted, RE, STOP, "IncidentOpened"),
        (RU, events.GangFinished, FI, STOP, "JobFinishing"),
        (RU, events.CheckpointPublished, RU, NONE, "CheckpointPublished"),
        *((phase, kind, phase, NONE, kind.__name__) for phase in (Q, RU, FI)
          for kind in (events.SaveFailed, events.SaveDelayed, events.SnapshotFailed, events.SnapshotRefused)),
        *((phase, events.SnapshotHeld, phase, NONE, None) for phase in (ST, RU, RS, RE)),
        (RS, events.GangStarted, RS, NONE, None),
        (RS, events.GangResumed, RS, NONE, None),
        (RS, events.StepsCompleted, RS, NONE, None),
        (RS, events.GangPaused, RS, STOP, "IncidentOpened"),
        (RS, events.GangFaulted, RE, STOP, "IncidentOpened"),
        (RS, events.GangFinished, FI, STOP, "JobFinishing"),
        *((phase, events.GangPaused, phase, NONE, None) for phase in (RE, FI, CA)),
        (SI, events.StepsCompleted, SI, NONE, None),
        (SI, events.GangPaused, SI, STOP, "GangStopping"),
        (SI, events.GangFaulted, SI, STOP, "GangStopping"),
        (SI, events.GangFinished, FI, STOP, "JobFinishing"),
        (SI, events.CheckpointPublished, SI, NONE, "CheckpointPublished"),
        *((SU, kind, SU, NONE, None) for kind in (events.GangStopped, events.GangFaulted, events.StandbysWarm)),
        *((phase, kind, phase, NONE, kind.__name__)
          for phase in (PL, ST, RU, RS, RE, FI, CA)
          for kind in (events.StepSkipped, events.Evaluated, events.LossSpiked)),
        (RE, events.GangStopped, PL, START, "GangPlaced"),
        (RE, events.GangRefused, PL, START, "GangPlaced"),
        (RE, events.GangFaulted, RE, NONE, None),
        (RE, events.GangFinished, RE, NONE, None),
        (RE, events.CheckpointPublished, RE, NONE, "CheckpointPublished"),
        (FI, events.GangStopped, OK, NONE, "JobSucceeded"),
        (FI, events.GangRefused, OK, NONE, "JobSucceeded"),
        (FI, events.CheckpointPublished, FI, NONE, "CheckpointPublished"),
        (CA, events.GangStopped, GONE, NONE, "JobCancelled"),
        (CA, events.GangRefused, GONE, NONE, "JobCancelled"),
        (CA, events.GangFinished, CA, NONE, None),
        *((phase, kind, phase, NONE, None) for phase in (OK, BAD, GONE) for kind in GANG_EVENTS),
    ],
)  # fmt: skip
def test_gang_events(phase: Phase, kind: type, then: Phase, commands: tuple[type, ...], record: str | None) -> None:
    here = World(world.fleet(1))
    here.bring(phase)
    decision = here.gang(kind, **FIELDS.get(kind, {}))
    assert here.job().phase is then
    assert tuple(map(type, decision.commands)) == commands
    assert (decision.records[-1].type if decision.records else None) == record


@pytest.mark.parametrize(
    ("phase", "then", "commands"),
    [(Q, GONE, NONE), (PL, CA, STOP), (ST, CA, STOP), (RU, CA, STOP), (RS, CA, STOP), (RE, CA, NONE), (FI, FI, NONE),
     (SI, CA, STOP), (SU, GONE, NONE),
     (CA, CA, NONE), (OK, OK, NONE), (BAD, BAD, NONE), (GONE, GONE, NONE)],
)  # fmt: skip
def test_cancel(phase: Phase, then: Phase, commands: tuple[type, ...]) -> None:
    here = World(world.fleet(1))
    here.bring(phase)
    decision = here.cancel()
    assert here.job().phase is then
    assert tuple(map(type, decision.commands)) == commands


@pytest.mark.parametrize(("phase", "kind"), sorted(itertools.product([*Phase, None], FACTS), key=str))
def test_what_is_found_out_about_a_checkpoint_is_logged_whatever_its_job_does(phase: Phase | None, kind: type) -> None:
    here = World(world.fleet(1))
    if phase is not None:
        here.bring(phase)
    (record,) = here.tell(kind("a", at=here.now, **FACT_FIELDS[kind])).records
    assert (record.uid, record.type, record.data["manifest"]) == ("a", kind.__name__, "m8")
    assert FACT_FIELDS[kind].get("reason", "m8 " if "m8" in record.reason else "step 8") in f"{record.reason} "
    if phase is not None:
        assert (here.job().phase, here.job().rejected) == (phase, ("m8",) * (kind is events.CheckpointRejected))


@pytest.mark.parametrize(
    ("phase", "then", "commands", "record"),
    [
        *((phase, RE, STOP, "RestoreRequested") for phase in (PL, ST, RU, RS)),
        (Q, Q, NONE, "RestoreRequested"),
        (RE, RE, NONE, "RestoreRequested"),
        *((phase, phase, NONE, None) for phase in (FI, CA, OK, BAD, GONE)),
    ],
)
def test_restore(phase: Phase, then: Phase, commands: tuple[type, ...], record: str | None) -> None:
    here = World(world.fleet(1))
    before = here.bring(phase)
    decision = here.restore(2)
    assert (here.job().phase, tuple(map(type, decision.commands))) == (then, commands)
    assert (decision.records[0].type if decision.records else None) == record
    assert (here.job().incidents, here.job().charges) == (before.incidents, before.charges) or phase is RE
    assert len(here.job().incidents) == len(before.incidents)
    assert here.job().charges == before.charges
    assert here.restore(2).records == ()  # asked again


def test_a_restore_end_to_end() -> None:
    here = World(world.fleet(1))
    here.submit(job=world.spec(steps=10))
    here.start()
    here.steps(1, 8)
    for step in (2, 4, 6):
        here.gang(events.CheckpointPublished, step=step, manifest=f"m{step}", nbytes=512)
    decision = here.restore(2, newer=("m4",))  # the word of m6 was not in the store yet
    job = here.job()
    assert job.reason == "goes back from step 8 to the checkpoint of step 2 by request"
    assert decision.commands == (StopGang("a", 1, job.reason, keep=True),)
    assert (job.phase, job.step, job.checkpoint, job.checkpoint_step, job.rejected) == (RE, 2, "m2", 2, ("m4", "m6"))
    assert [record.reason for record in decision.records[1:]] == [
        f"checkpoint m{step} is never tried again: restored to step 2 by request" for step in (4, 6)
    ]
    late = here.gang(events.CheckpointPublished, step=8, manifest="m8")  # of the attempt that is being stopped
    assert [record.type for record in late.records] == ["CheckpointPublished", "CheckpointRejected"]
    assert (here.job().checkpoint, here.job().rejected) == ("m2", ("m4", "m6", "m8"))
    here.stopped()
    start = here.commands[-1]
    assert (start.attempt, start.rejected, start.restored) == (2, ("m4", "m6", "m8"), Restored(2, 1, 1))
    here.start(resumed=2, manifest="m2")
    assert here.restore(2).records == ()  # it is there
    here.steps(3, 8)
    job = here.job()
    assert (job.step, job.high_step, job.tokens, job.samples) == (8, 8, 8 * 256, 8 * 16)
    assert (job.productive_s, job.incidents, job.charges) == (8 * world.STEP_S, (), ())
    here.gang(events.CheckpointPublished, step=4, manifest="m4b")  # of steps done again: good
    assert (here.job().checkpoint, here.job().rejected) == ("m4b", ("m4", "m6", "m8"))
    codec.load(codec.dump(here.job()))
    here.steps(9, 10)
    here.gang(events.GangFinished)
    here.stopped()
    assert (here.job().phase, here.job().tokens) == (OK, 10 * 256)


def test_a_restore_costs_an_open_incident_no_more_than_its_own_steps() -> None:
    here = World(world.fleet(1))
    here.submit()
    here.start()
    here.steps(1, 8)
    for step in (2, 6):
        here.gang(events.CheckpointPublished, step=step, manifest=f"m{step}")
    here.fault()
    here.restore(2, newer=("m6",))
    here.stopped()
    here.start(resumed=2, manifest="m2")
    here.steps(3, 9)
    (incident,) = here.job().incidents
    assert (incident.steps_redone, incident.recover_s is not None) == (2, True)


def test_a_job_does_not_go_back_to_what_was_found_to_be_bad_meanwhile() -> None:
    here = World(world.fleet(1))
    here.bring(RU)
    here.gang(events.CheckpointPublished, step=2, manifest="m2")
    here.tell(events.CheckpointRejected("a", 1, "m2", "torn", here.now))
    (record,) = here.restore(2).records
    assert (record.type, here.job().phase, here.job().restored) == ("RestoreRefused", RU, None)


def test_cancel_of_a_recovering_job_without_a_gang_is_immediate() -> None:
    here = World(world.fleet(1))
    here.bring(RE)
    here.observe(Fleet())
    here.stopped()
    assert here.job().phase is RE
    here.cancel()
    assert here.job().phase is GONE
    assert here.job().ended_at == here.now


@pytest.mark.parametrize("phase", [PL, ST, RU])
def test_a_node_that_the_gang_stands_on_breaks_it(phase: Phase) -> None:
    here = World(world.fleet(2))
    here.bring(phase)
    assert here.observe(world.without(here.state.fleet, "n1")).records == ()
    decision = here.observe(Fleet())
    (incident,) = here.job().incidents
    assert (incident.kind, incident.node, incident.cause) == ("node_lost", "n0", Cause.INFRASTRUCTURE)
    assert decision.commands == (StopGang("a", 1, here.job().reason, keep=True),)
    assert "node n0 is gone" in here.job().reason


@pytest.mark.parametrize(
    ("phase", "seconds", "kind", "cause"),
    [
        (PL, 120, "start_failed", Cause.INFRASTRUCTURE),
        (ST, 180, "start_failed", Cause.INFRASTRUCTURE),
    ],
)
def test_f24_a_start_without_progress_is_broken(phase: Phase, seconds: float, kind: str, cause: Cause) -> None:
    here = World(world.fleet(1))
    here.bring(phase)
    assert here.tick(seconds).commands == ()
    here.tick(1)
    (incident,) = here.job().incidents
    assert (incident.kind, incident.cause, incident.detect_s) == (kind, cause, seconds + 1)
    assert incident.faulted_at == here.now - incident.detect_s  # the silence is part of the recovery
    assert here.job().phase is RE


def test_f2_a_gang_that_stands_still_is_looked_at_and_then_broken() -> None:
    here = World(world.fleet(1))
    here.bring(RU)
    assert here.tick(60).commands == ()
    (look,) = here.tick(1).commands
    assert look == InspectGang("a", 1, "no progress within the limit of a step")
    assert here.tick(3).commands == ()
    found = events.Fault("hang", "no progress within the limit of a step\none is stopped", rank=1, node="n0")
    here.gang(events.GangFaulted, faults=(found,))
    (incident,) = here.job().incidents
    assert (incident.kind, incident.cause, incident.rank, incident.node) == ("hang", Cause.HANG, 1, "n0")
    assert incident.detect_s == 64
    assert here.job().phase is RE


def test_f2_a_look_that_is_not_answered_is_not_waited_for() -> None:
    here = World(world.fleet(1))
    here.bring(RU)
    here.tick(61)
    assert here.tick(6).commands == ()
    (order,) = here.tick(1).commands
    assert isinstance(order, StopGang)
    (incident,) = here.job().incidents
    assert (incident.kind, incident.rank, incident.detect_s) == ("hang", None, 68)


def test_limits_are_given() -> None:
    here = World(world.fleet(1), liveness.Limits(step_s=1, step_factor=2, inspecting_s=0.1))
    here.bring(RU)
    here.tick(1.5)
    here.tick(0.2)
    assert here.job().phase is RE


@pytest.mark.parametrize(("policy", "leaves"), [("log", False), ("move", True)])
def test_f19_a_slow_node_is_named_and_by_policy_left(policy: str, leaves: bool) -> None:
    here = World(world.fleet(2, 1))
    here.submit(job=world.job_spec(slots=2, placement={"stragglers": policy}))
    here.start()
    here.steps(1, 6)
    node = here.job().placement.slots[0].name
    decision = here.gang(events.StragglerFound, node=node, rank=0, ranks=1, factor=2.0)
    assert decision.records[0].type == "StragglerFound"
    assert f"rank 0 on {node} take 2.0 times as long" in decision.records[0].reason
    assert (here.job().phase is RS) == leaves
    assert here.state.health[node].excluded != "" if leaves else node not in here.state.health


def test_a_recovery_end_to_end() -> None:
    here = World(world.fleet(2, 1))
    here.submit(job=world.spec(slots=4))
    here.start()
    here.steps(1, 6)
    here.gang(events.CheckpointPublished, step=4, manifest="m4")
    here.now += 0.25
    here.fault()
    fault_at = here.now
    assert here.job().reason == (
        "process_died on rank 1 after step 6: killed by signal 9; "
        "restarts at once, infrastructure fault 1 of 100 within an hour"
    )
    here.now += 1
    here.stopped()
    assert here.job().attempt == 2
    here.start(resumed=4, manifest="m4")
    here.steps(5, 6)
    (incident,) = here.job().incidents
    assert (incident.step, incident.steps_redone, incident.recover_s) == (6, 2, None)
    decision = here.steps(7, 8)
    (incident,) = here.job().incidents
    assert incident.recover_s == here.now - world.STEP_S - fault_at
    assert incident.detect_s == 0.25
    assert [record.type for record in decision.records] == ["IncidentClosed"]
    assert "2 steps redone" in decision.records[0].reason
    job = here.job()
    assert (job.step, job.high_step, job.tokens, job.samples) == (8, 8, 8 * 256, 8 * 16)
    assert job.productive_s == 8 * world.STEP_S
    here.steps(9, 10)
    here.gang(events.GangFinished)
    here.stopped()
    assert here.job().reason.startswith("all 10 steps in 7.2 s, goodput 0.69")
    assert here.job().reason.endswith("; its last checkpoint was not written, the newest is of step 4")
    assert [record.type for record in here.records] == [
        "JobQueued", "GangPlaced", "JobStarted", "GangResumed", "JobRunning", "CheckpointPublished",
        "IncidentOpened", "GangStopped", "GangPlaced", "JobStarted", "GangResumed", "JobRunning",
        "IncidentClosed", "JobFinishing", "JobSucceeded",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("published", "says"),
    [
        ([4, 10], ""),
        ([4], "; its last checkpoint was not written, the newest is of step 4"),
        ([], "; its last checkpoint was not written, there is no checkpoint"),
    ],
)
def test_success_says_when_the_last_checkpoint_is_missing(published: list[int], says: str) -> None:
    here = World(world.fleet(1))
    here.submit()
    here.start()
    here.steps(1, 10)
    for step in published:
        here.gang(events.CheckpointPublished, step=step, manifest=f"m{step}")
    here.gang(events.GangFinished)
    here.stopped()
    assert here.job().phase is Phase.SUCCEEDED
    assert here.job().reason.partition("; ")[1:] == (says[:2], says[2:])


def test_steps_of_a_broken_attempt_that_were_reported_late_count() -> None:
    here = World(world.fleet(1))
    here.bring(RE)
    here.steps(5, 6)
    job = here.job()
    assert (job.phase, job.high_step, job.incidents[0].step) == (RE, 6, 6)
    assert job.incidents[0].recover_s is None
    here.stopped()
    here.start(resumed=5)
    here.steps(6, 7)
    assert (here.job().incidents[0].steps_redone, here.job().productive_s) == (1, 7 * world.STEP_S)


def test_what_recovery_stops_fails_once_the_slots_are_free() -> None:
    here = World(world.fleet(1))
    here.bring(RU, job=world.spec(budgets=(("user_error", 0),)))
    decision = here.fault("user", "ValueError: bad")
    assert here.job().phase is FI
    assert [type(command) for command in decision.commands] == [StopGang]
    here.cancel()
    here.stopped()
    assert here.job().phase is BAD
    assert here.job().reason == (
        "user on rank 1 after step 4: ValueError: bad; user_error fault 1 within an hour, the budget is 0"
    )


def test_an_attempt_that_finishes_without_a_step_ends_the_job() -> None:
    here = World(world.fleet(1))
    here.bring(RU)
    here.steps(5, 10)
    here.fault("node_lost", "node n0 is gone")
    here.stopped()
    here.start(resumed=10, manifest="m10")
    here.now += 2
    here.gang(events.GangFinished)
    here.stopped()
    (incident,) = here.job().incidents
    assert (here.job().phase, incident.steps_redone) == (OK, 0)
    assert incident.recover_s is not None


def test_f24_a_refused_attempt_tries_again_later_each_time_and_goes_where_it_came_from() -> None:
    here = World(world.fleet(1))
    here.submit()
    for wait, often in ((1, ""), (2, ""), (4, "; that is 3 times in a row, though its nodes look free")):
        here.gang(events.GangRefused, reason="no room")
        assert here.job().phase is Q
        assert here.job().reason == (
            f"attempt {here.job().attempt} was refused: no room{often}; tries again after {wait} s"
        )
        assert here.tick(wait - 0.5).records == ()
        assert here.tick(0.5).records[-1].type == "GangPlaced"
    here.start()
    here.steps(1, 2)
    here.fault()
    here.stopped()
    here.gang(events.GangRefused, reason="no room")
    assert here.job().phase is RE
    assert here.job().not_before == here.now + 1


def test_a_refused_gang_that_was_to_be_stopped_is_stopped() -> None:
    here = World(world.fleet(1))
    here.bring(PL)
    here.tick(121)
    here.gang(events.GangRefused, reason="no room")
    assert [type(command) for command in here.commands] == [StartGang, StopGang, StartGang]


def test_waiting_says_why_with_counts_and_only_once() -> None:
    here = World(world.fleet(2))
    here.submit("a", world.spec(slots=4, name="first"))
    here.submit("b", world.spec(slots=3, name="second"))
    here.submit("c", world.spec(slots=1, name="third"))
    assert [here.job(uid).position for uid in "abc"] == [None, 1, 2]
    assert here.job("b").reason == "needs 3 slots; 0 of 4 are free, 4 held by a"
    assert here.job("c").reason == "waits behind b, which comes first and needs 3 slots"
    said = len(here.records)
    for _ in range(5):
        here.tick(1)
    assert len(here.records) == said
    here.observe(world.fleet(3))
    assert here.job("b").reason == "needs 3 slots; 2 of 6 are free, 4 held by a"
    assert here.job("c").phase is PL  # it fills in
    here.observe(world.fleet(4))
    assert here.job("b").phase is PL


def test_a_job_that_waits_says_what_the_topology_lacks() -> None:
    here = World(world.fleet(1, 1, slots=3))
    asked = {"dp": 1, "tp": 2, "pp": 2}
    here.submit(job=world.job_spec(slots=4, parallel=asked, placement={"pp": "rack"}))
    assert here.job().reason == (
        "needs 2 nodes with 2 free slots for tp 2 in one rack; the largest rack has 1; "
        "it would not fit if all were free"
    )
    assert here.records[-1].type == "JobWaiting"


def test_recovering_jobs_go_before_queued_ones_even_while_they_stop() -> None:
    here = World(world.fleet(2))
    here.submit("a", world.spec(slots=2), seq=7)
    here.start("a")
    here.steps(1, 4, "a")
    here.fault(uid="a")
    here.submit("b", world.spec(slots=2), seq=3)
    assert here.job("b").phase is Q
    here.stopped("a")
    assert [here.job(uid).phase for uid in "ab"] == [PL, PL]
    assert here.commands[-2].uid == "a"


def test_back_off_keeps_the_slots_from_others() -> None:
    here = World(world.fleet(1))
    here.bring(RU)
    here.submit("b")
    here.fault("user", "ValueError: bad")
    here.stopped()
    assert [here.job(uid).phase for uid in "ab"] == [RE, Q]
    here.tick(1)
    assert [here.job(uid).phase for uid in "ab"] == [PL, Q]


def test_a_lost_node_moves_the_job_to_a_spare() -> None:
    here = World(world.fleet(2, 1))
    here.submit(job=world.spec(slots=4))
    assert here.job().placement.nodes == ("id0", "id2")
    here.start()
    here.steps(1, 2)
    here.observe(world.without(here.state.fleet, "n2"))
    here.stopped()
    assert here.job().placement.nodes == ("id0", "id1")


def test_a_rejected_checkpoint_is_not_tried_again() -> None:
    here = World(world.fleet(1))
    here.bring(RU)
    here.gang(events.CheckpointPublished, step=4, manifest="m4")
    here.tell(events.CheckpointRejected("a", 1, "m4", "checksum of block 3", here.now))
    assert here.tell(events.CheckpointRejected("a", 1, "m4", "again", here.now)).records == ()
    assert (here.job().checkpoint, here.job().rejected) == (None, ("m4",))
    here.fault()
    here.stopped()
    assert here.commands[-1].rejected == ("m4",)


@pytest.mark.parametrize(
    ("action", "then", "says"),
    [
        ("skip", RU, "attempt 1 leaves out the samples of step 5 and goes on with the next ones: loss nan"),
        ("rescale", RU, "attempt 1 does step 5 again with a smaller loss scale: loss nan"),
        ("rollback", ST, "attempt 1 goes back from step 5 to its newest checkpoint and leaves out the samples since: "
         "loss nan"),
    ],
)  # fmt: skip
def test_a_step_without_a_number(action: str, then: Phase, says: str) -> None:
    here = World(world.fleet(1))
    here.bring(RU)
    here.now += 59
    decision = here.gang(events.StepSkipped, step=5, action=action, reason="loss nan", samples=(64, 65))
    (record,) = decision.records
    assert (here.job().phase, record.reason, decision.commands) == (then, says, ())
    assert {**record.data, "phase": None} == {
        "step": 5, "action": action, "samples": (64, 65), "attempt": 1, "phase": None,
    }  # fmt: skip
    assert here.tick(59).records == ()  # it counts as a sign of life
    assert here.job().phase is then


def test_an_attempt_that_goes_back_has_the_time_of_a_start_and_counts_each_step_once() -> None:
    here = World(world.fleet(1))
    here.submit()
    here.start()
    here.steps(1, 4)
    here.gang(events.CheckpointPublished, step=4, manifest="m4")
    here.steps(5, 7)
    here.gang(events.Evaluated, step=7, loss=2.5, tokens=4096)
    here.gang(events.StepSkipped, step=8, action="rollback", reason="loss nan", samples=())
    here.tick(170)
    assert here.gang(events.GangResumed, step=4, manifest="m4").records[0].type == "GangResumed"
    job = here.job()
    assert (job.phase, job.step, job.high_step, job.attempt, job.incidents) == (ST, 4, 7, 1, ())
    here.steps(5, 7)
    here.gang(events.Evaluated, step=7, loss=2.25, tokens=4096)
    job = here.job()
    assert (job.phase, job.step, job.tokens, job.samples) == (RU, 7, 7 * 256, 7 * 16)
    assert (job.productive_s, job.eval_step, job.eval_loss) == (7 * world.STEP_S, 7, 2.25)
    here.steps(8, 10)
    here.gang(events.GangFinished)
    here.stopped()
    assert (here.job().phase, here.job().tokens, here.job().productive_s) == (OK, 10 * 256, 10 * world.STEP_S)
    told = [record.type for record in here.records]
    assert told.count("JobRunning") == told.count("GangResumed") == told.count("Evaluated") == 2


def test_a_spike_is_told_with_its_samples() -> None:
    here = World(world.fleet(1))
    here.bring(RU)
    figures = {"step": 5, "loss": 9.5, "usual": 2.5, "bound": 3.0}
    (record,) = here.gang(events.LossSpiked, **figures, samples=(64, 80)).records
    assert record.reason == (
        "loss 9.5000 of step 5 is a spike: 2.5000 is usual, up to 3.0000; its samples are 64 to 79"
    )
    assert {**record.data, "phase": None} == {**figures, "samples": [64, 80], "attempt": 1, "phase": None}


def test_samples_are_left_out_after_the_checkpoint_that_was_gone_back_to() -> None:
    here = World(world.fleet(1))
    here.bring(RU)
    for step in (4, 8):
        here.gang(events.CheckpointPublished, step=step, manifest=f"m{step}")
    asked = events.RestoreRequested("a", 4, 1, "m4", ("m8",), here.now, 32)
    (record, *_) = here.tell(asked).records
    assert record.reason.endswith("to the checkpoint of step 4, and leaves out 32 samples after it, by request")
    assert here.tell(asked).records == ()  # asked again
    here.stopped()
    (start,) = (one for one in here.commands if isinstance(one, StartGang) and one.attempt == 2)
    assert start.restored == Restored(4, 1, 1, 32)
    codec.load(codec.dump(here.job()))


def test_an_attempt_that_goes_back_and_does_not_arrive_is_broken() -> None:
    here = World(world.fleet(1))
    here.bring(RU)
    here.gang(events.StepSkipped, step=5, action="rollback", reason="loss nan", samples=())
    here.tick(181)
    assert (here.job().phase, here.job().incidents[0].kind) == (RE, "start_failed")


@pytest.mark.parametrize(
    ("kind", "cause", "at_step"),
    [("numeric", Cause.USER_ERROR, "NonFinite: loss nan at step 5"), ("drift", Cause.INFRASTRUCTURE, "Drifted: w")],
)
def test_figures_that_go_wrong_at_the_same_step_again_and_again_end_the_job(
    kind: str, cause: Cause, at_step: str
) -> None:
    here = World(world.fleet(1))
    here.submit(job=world.spec(budgets=(("user_error", -1), ("infrastructure", -1))))
    for time in range(3):
        here.start(resumed=0)
        here.steps(1, 4)
        here.fault(kind, f"{at_step} on rank {time}")  # the place may differ
        assert here.job().incidents[-1].cause is cause
        here.stopped()
        here.tick(30)
    assert (here.job().phase, here.job().attempt) == (BAD, 3)
    assert here.job().reason.startswith(
        f"no_progress: 3 times at the same step: {kind} on rank 1 after step 4: {at_step}"
    )


def test_copies_that_drift_are_healed_by_the_newest_checkpoint_at_no_cost_of_the_user() -> None:
    here = World(world.fleet(1))
    here.bring(RU, job=world.spec(steps=40, budgets=(("user_error", 0),)))
    for step in (8, 16, 24, 32):
        here.gang(events.CheckpointPublished, step=step - 4, manifest=f"m{step - 4}")
        here.steps(step - 3, step)
        here.fault("drift", "Drifted: copies that must be equal are not")
        assert here.job().phase is RE
        here.stopped()
        here.tick(5)
        here.start(resumed=step - 4, manifest=f"m{step - 4}")
        here.steps(step - 3, step)
    assert here.job().phase is RU


@pytest.mark.parametrize(("loss", "kept", "says"), [(2.5, 2.5, "loss 2.5000"), (float("nan"), None, "loss nan")])
def test_an_evaluation_is_kept_and_told(loss: float, kept: float | None, says: str) -> None:
    here = World(world.fleet(1))
    here.bring(RU)
    (record,) = here.gang(events.Evaluated, step=4, loss=loss, tokens=4096).records
    assert record.reason == f"evaluation after step 4: {says} over 4096 tokens"
    assert (here.job().eval_step, here.job().eval_loss, here.job().loss) == (4, kept, 1.0)
    codec.dump(here.job())


def test_an_evaluation_names_its_sources_and_the_best() -> None:
    here = World(world.fleet(1))
    here.bring(RU)
    sources = (("web", 2.0, 96), ("code", 3.0, 32))
    told = {"loss": 2.25, "tokens": 128, "sources": sources}
    (record,) = here.gang(events.Evaluated, step=4, best=(4, 2.25), **told).records
    assert record.reason.endswith("loss 2.2500 over 128 tokens (web 2.0000, code 3.0000), the best so far")
    (record,) = here.gang(events.Evaluated, step=8, best=(4, 2.25), worse=1, **told).records
    assert record.reason.endswith("(web 2.0000, code 3.0000); 2.2500 after step 4 is best")


def test_a_run_that_becomes_no_better_ends_early_and_says_so() -> None:
    here = World(world.fleet(1))
    here.submit(job=world.job_spec(eval={"data": [{"source": "a.txt"}], "every": 1, "patience": 2}))
    here.start()
    here.steps(1, 3)
    here.gang(events.Evaluated, step=3, loss=2.5, tokens=8, best=(1, 2.0), worse=2)
    here.gang(events.CheckpointPublished, step=3, manifest="m3")
    here.gang(events.GangFinished)
    here.stopped()
    assert here.job().phase is Phase.SUCCEEDED
    told = "stopped after step 3 of 10, 2 evaluations without a better one than 2.0000 after step 1, in"
    assert here.job().reason.startswith(told)
    assert "not written" not in here.job().reason


def test_an_event_of_a_forgotten_job_is_dropped() -> None:
    here = World(world.fleet(1))
    assert here.tell(events.GangStopped("z", 1, here.now)).records == ()
    assert here.cancel("z").records == ()


def test_submitted_twice_is_submitted_once() -> None:
    here = World(world.fleet(1))
    here.bring(RU)
    before = here.job()
    assert here.submit("a").records == ()
    assert here.job() == before


def test_f7_a_checkpoint_that_leads_to_the_same_fault_is_quarantined_and_an_older_one_tried_before_the_job_ends() -> (
    None
):
    here = World(world.fleet(1))
    here.submit(job=world.spec(steps=20, budgets=(("user_error", -1),)))
    here.start()
    here.steps(1, 8)
    for step in (4, 8):
        here.gang(events.CheckpointPublished, step=step, manifest=f"m{step}")
    for _ in range(3):
        decision = here.fault("numeric", "NonFinite: loss nan")
        here.stopped()
        here.tick(60)
        here.start(resumed=8, manifest="m8")
    assert [record.type for record in decision.records] == ["IncidentOpened", "CheckpointRejected"]
    assert "passes over the state of step 8; restarts after" in decision.records[0].reason
    order = here.commands[-1]
    assert order.rejected == ("m8",)
    assert order.restored.bars(8, 1)
    assert not order.restored.bars(4, 1)
    here.gang(events.GangResumed, step=4, manifest="m4")
    here.steps(5, 8)
    here.fault("numeric", "NonFinite: loss nan")
    here.stopped()
    assert (here.job().phase, here.job().reason.startswith("no_progress: 4 times")) == (BAD, True)


def test_f11_a_rank_that_was_killed_for_memory_is_told_with_its_size_and_no_node_is_blamed() -> None:
    here = World(world.fleet(1))
    here.bring(RU)
    fault = events.Fault("out_of_memory", "killed for memory with 61 GiB resident", rank=1, node="n0")
    here.gang(events.GangFaulted, faults=(events.Fault("process_died", "gone", 1, "n0"), fault))
    (incident,) = here.job().incidents
    assert (incident.kind, incident.cause) == ("out_of_memory", Cause.INFRASTRUCTURE)
    assert "61 GiB" in here.job().reason
    assert dict(here.state.health) == {}
