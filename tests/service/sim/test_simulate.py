"""A job on a fleet that fails: by hand, in closed form, at random, and on recorded faults."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from service.contracts.job import Phase
from service.sim import baseline, clock, faults, report, simulate, trace
from service.sim.faults import Failure, Rate
from service.sim.ledger import Use
from service.sim.phases import Phases
from service.sim.stretch import Stall
from tests.service.sim import world
from tests.service.sim.world import down, hang, process, scenario

FREE = Stall(1, 0)  # a snapshot after each step, at no cost


def test_without_faults_all_but_the_start_is_useful() -> None:
    result = world.run(scenario(until_s=112))
    assert world.spent(result) == {Use.RESTART: 4 + 8, Use.USEFUL: 100}
    assert result.job.high_step == 10
    assert report.figures(result)["goodput"] == pytest.approx(100 / 112)


def test_a_node_is_lost_and_a_spare_takes_its_place() -> None:
    """Starts for 12 s. Step 9 completes at 102, step 10 has had 3 s at 105. Known at 110; 1 s to stop, 4 to start,
    2 to load: step 10 begins again at 117, is completed at 127, and step 19 at 217."""
    given = scenario([down(0, 105, 500)], 217, nodes=5, snapshot=FREE)
    result = world.run(given)
    assert world.spent(result) == {Use.RESTART: 12 + 7, Use.USEFUL: 190, Use.REDONE: 3, Use.DETECTION: 5}
    assert result.job.high_step == 19
    [incident] = result.job.incidents
    assert (incident.kind, incident.node, incident.step, incident.steps_redone) == ("node_lost", "n0", 9, 0)
    assert (incident.detect_s, incident.recover_s) == (8, 25)  # both from the last completed step
    slots = {use: clock.seconds(us) for use, us in result.ledger.slots.items() if us}
    assert slots == {
        Use.USEFUL: 4 * 190, Use.RESTART: 4 * 19, Use.REDONE: 4 * 3, Use.DETECTION: 4 * 5,
        Use.SPARE: 105, Use.DOWN: 112,
    }  # fmt: skip
    told = report.figures(result)
    assert told["goodput"] == told["goodput_available"] == pytest.approx(190 / 217)
    assert told["goodput_fleet"] == pytest.approx(4 * 190 / (5 * 217))


def test_without_snapshots_the_steps_since_the_checkpoint_are_done_again() -> None:
    """A checkpoint each 4 steps costs 1 s: steps 4 and 8 complete at 52 and 93. The process dies at 120, in step 11,
    which began at 114. Known at 122, begins again after step 8 at 122 + 1 + 4 + 8 = 135: steps 9 and 10 again until
    155, then step 11 until 165 and 12 until 175."""
    given = scenario([process(1, 120)], 175.5, checkpoint=Stall(4, clock.us(1)))
    result = world.run(given)
    redone = 6 + 20
    assert world.spent(result) == {
        Use.RESTART: 12 + 13, Use.USEFUL: 120, Use.REDONE: redone, Use.DETECTION: 2, Use.SNAPSHOTS: 2.5,
    }  # fmt: skip
    [incident] = result.job.incidents
    assert (incident.kind, incident.rank, incident.node, incident.steps_redone) == ("process_died", 1, "n1", 2)
    assert incident.recover_s == 165 - 122
    assert result.job.checkpoint_step == 8  # that of step 12 is not whole before 176


def test_without_a_spare_the_core_waits_for_the_node_and_its_cooldown() -> None:
    result = world.run(scenario([down(2, 105, 400)], 505, snapshot=FREE))
    assert world.spent(result) == pytest.approx({
        Use.RESTART: 12 + 7, Use.DETECTION: 5, Use.WAITING: 430 - 111, Use.REDONE: 3, Use.USEFUL: 90 + 505 - 436,
    }, abs=1e-5)  # fmt: skip
    assert any("needs 4 slots; 3 of 3 are free" in record.reason for record in result.records)


def test_an_elastic_job_goes_on_with_fewer_replicas_and_grows_again() -> None:
    """12 samples: 3 micro-batches on 4 replicas, 4 on 3: a step takes 40/3 s. It begins again at 117; the node is back
    at 400 and has settled at 520, in the step that ends at 117 + 31 x 40/3; then 1 + 4 + 2 s later it makes steps of
    10 s again."""
    result = world.run(scenario([down(2, 105, 400)], 600, snapshot=FREE, elastic=True))
    grown_at = 117 + 31 * 13.333333
    assert result.grown == 1
    assert result.job.layout is not None
    assert result.job.layout.dp == 4
    spent = world.spent(result)
    assert spent[Use.USEFUL] == pytest.approx(90 + (grown_at - 117) + (600 - grown_at - 7), abs=1e-4)
    assert spent[Use.RESTART] == pytest.approx(12 + 7 + 7)
    assert Use.WAITING not in spent
    slots = {use: us / 1e6 for use, us in result.ledger.slots.items()}
    assert slots[Use.USEFUL] == pytest.approx(4 * 90 + 3 * (grown_at - 117) + 4 * (593 - grown_at), abs=1e-3)
    assert slots[Use.SMALLER] == pytest.approx(grown_at - 400, abs=1e-3)  # the fourth slot was alive since 400
    assert [(one.kind, one.steps_redone) for one in result.job.incidents] == [("node_lost", 0), ("rescale", 0)]


def test_a_hang_is_found_by_the_cores_own_limit() -> None:
    """60 s, and a microsecond, after the end of the last step at 102."""
    result = world.run(scenario([hang(0, 105)], 350, snapshot=FREE))
    [incident] = result.job.incidents
    assert (incident.kind, incident.cause) == ("hang", "hang")
    assert incident.detect_s == pytest.approx(60, abs=1e-5)
    assert world.spent(result)[Use.DETECTION] == pytest.approx(57, abs=1e-5)


def test_a_node_that_dies_while_it_starts_is_lost_once_more() -> None:
    """The first attempt's ranks are gone at 111; a node of the second dies at 113, which is known at 118. The second
    fault in a row waits for a second, in which the ranks are ended."""
    result = world.run(scenario([down(0, 105, 900), down(1, 113, 900)], 300, nodes=6, snapshot=FREE))
    assert [one.node for one in result.job.incidents] == ["n0", "n1"]
    assert result.job.attempt == 3
    spent = world.spent(result)
    assert spent[Use.DETECTION] == 5 + 5
    assert spent[Use.RESTART] == 12 + (1 + 2) + (1 + 4 + 2)
    assert spent[Use.USEFUL] == 90 + 300 - 125


@pytest.mark.parametrize(
    ("lost", "resumed"),
    [
        ((0,), 9),  # its peer has it
        ((0, 1), 5),  # peers of each other: the newest checkpoint
    ],
)
def test_state_is_in_memory_while_one_of_two_copies_is(lost: tuple[int, ...], resumed: int) -> None:
    """Two nodes of one replica each: both copies of both parts are on them."""
    failures = [down(node, 105, 150) for node in lost]
    given = scenario(failures, 300, nodes=2, spec=world.job(dp=2), snapshot=FREE, checkpoint=Stall(5, 0))
    result = world.run(given)
    [incident] = result.job.incidents
    assert incident.steps_redone == 9 - resumed
    assert result.from_memory == (resumed == 9)


def test_a_later_snapshot_has_another_second_place() -> None:
    """The first node's peer is gone long before it."""
    given = scenario([down(1, 50, 900), down(0, 105, 900)], 300, nodes=3, spec=world.job(dp=1), snapshot=FREE)
    result = world.run(given)
    assert [(one.node, one.steps_redone) for one in result.job.incidents] == [("n0", 0)]


def test_a_job_that_completes_its_steps_ends_there() -> None:
    result = world.run(scenario(spec=world.job(steps=5)))
    assert (result.job.phase, result.job.high_step) == (Phase.SUCCEEDED, 5)
    assert clock.seconds(result.end) == 12 + 50 + 1


def test_a_fault_that_comes_again_at_the_same_step_ends_the_job() -> None:
    """What the core does to a job without progress, it does here: before the fourth the snapshot is passed over."""
    result = world.run(scenario([process(1, at, "bad memory") for at in (105, 118, 130, 240)], snapshot=FREE))
    assert result.job.phase is Phase.FAILED
    assert "no_progress" in result.job.reason


def test_the_closed_form_of_exponential_faults() -> None:
    """Faults of processes at rate L, a checkpoint of C seconds after each T seconds of work, D to know of a fault, S
    to stop, R to start and load, in which faults strike too.

    From one fault to the next that counts: D + S, in which there is no gang to break, then a time X, exponential by
    its lack of memory. Of X the first R starts, then come pieces of T + C, each kept where it is whole: given that
    X > R, their number is geometric with p = exp(-L (T + C)), in the mean p / (1 - p). So of D + S + 1/L seconds in
    the mean exp(-L R) T p / (1 - p) are useful. (The core waits a second where a fault comes before a new step; that
    is left out. Each fault is another: the same one at the same step three times would end the job.)
    """
    rate, work, cost, detect, stop, start = 1 / 3600, 1200, 30, 10, 5, 120
    phases = Phases(detect, detect, stop, start, 0, 0, 0)
    kept = math.exp(-rate * (work + cost))
    expected = math.exp(-rate * start) * work * kept / (1 - kept) / (detect + stop + 1 / rate)

    def simulated(seed: int) -> float:
        per_node = Rate("chance", "process", per_node_hour=rate * 3600 / 4)
        span = 150 * clock.HOUR
        failures = faults.drawn([per_node], [1] * 4, span, seed)
        given = scenario(
            [dataclasses.replace(one, cause=f"fault {number}") for number, one in enumerate(failures)],
            span / clock.SECOND,
            checkpoint=Stall(20, clock.us(cost)),
            step_s=60,
            phases=phases,
        )
        result = simulate.run(given)
        world.check(given, result)
        assert len(result.job.incidents) > 80
        return float(report.figures(result)["goodput_available"])

    runs = [simulated(seed) for seed in range(28)]
    assert 0.7 < expected < 0.8
    assert sum(runs) / len(runs) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_no_invariant_breaks_in_a_long_random_run(seed: int, elastic: bool) -> None:
    """Faults of all kinds come faster than a recovery takes; nodes return soon, late, at once, and fail together."""
    chance = random.Random(seed)
    failures: list[Failure] = []
    at = 0.0
    for number in range(400):
        at += chance.choice([0, 0, 1, 5, 17, 60, 300, 2000])
        kind = chance.choice([down, down, down, process, hang])
        node = chance.randrange(8)
        if kind is down:
            failures.append(down(node, at, at + chance.choice([0, 1, 4, 30, 500, 5000])))
        else:
            failures.append(process(node, at, f"fault {number}") if kind is process else hang(node, at))
    spec = world.job(dp=3, pp=2).model_copy(update={"budgets": world.job().budgets.model_copy(update=UNBOUND)})
    given = scenario(
        sorted(failures), at + 1000, nodes=8, spec=spec, snapshot=Stall(2, clock.us(0.5)),
        checkpoint=Stall(5, clock.us(1)), elastic=elastic, rack=3,
    )  # fmt: skip
    result = world.run(given)
    assert result.job.phase is not Phase.FAILED, result.job.reason
    assert result.job.attempt > 50
    assert result.job.high_step > 100
    assert result.job.started_at is not None


UNBOUND = {"infrastructure": -1, "hang": -1}


def test_the_same_seed_gives_the_same_result() -> None:
    def told(seed: int) -> dict[str, object]:
        failures = faults.drawn(faults.table("aws-p3-spot"), [1] * 6, clock.DAY, seed)
        return report.figures(simulate.run(scenario(failures, 86_400, nodes=6, snapshot=FREE)))

    assert told(3) == told(3)
    assert told(3) != told(4)


@pytest.mark.skipif(not world.TRACES.exists(), reason="the recorded faults are not beside the repository")
def test_recorded_faults_on_2048_nodes() -> None:
    """Eight days of a real fleet's faults and repairs, so that this takes seconds; tests/bench/planner.py has all of
    them. One slot stands for a node of eight; the time that 16,384 ranks take to connect is counted."""
    recorded = trace.read(world.TRACES / "infinitehbd/fault_trace.json")
    days = 8
    given = scenario(
        trace.spread(recorded, 2048, days * clock.DAY, 0), days * 86_400, nodes=2048,
        spec=world.job(dp=128, pp=16, batch=2048), step_s=6.5, snapshot=Stall(1, clock.us(0.015)),
        checkpoint=Stall(100, 0), elastic=True, rack=16,
        phases=dataclasses.replace(Phases().with_standbys(), connect_rank_s=8 * 0.003),
    )  # fmt: skip
    results = [simulate.run(given), simulate.run(baseline.of(given))]
    ours, usual = (report.figures(one)["goodput_available"] for one in results)
    world.check(given, results[0])
    assert len(results[1].job.incidents) > 25
    assert ours > 0.97
    assert 0.85 < usual < 0.96
