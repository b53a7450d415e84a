from __future__ import annotations

import dataclasses
import math

import pytest

from service.contracts.events import Evaluated, Step
from service.core import progress
from service.core.state import Incident, Job
from tests.service.core import world


def job(**fields: object) -> Job:
    return Job("a", 1, world.spec(), 0.0, attempt=1, **fields)


def steps(first: int, last: int, loss: float = 1.0) -> list[Step]:
    return [world.step(number, at=100.0 + number, loss=loss) for number in range(first, last + 1)]


def test_each_step_counts_once() -> None:
    one = progress.completed(progress.resumed(job(), 0, 100.0), steps(1, 8), 109.0)
    two = progress.completed(progress.resumed(one, 4, 120.0), steps(5, 9, loss=0.5), 130.0)
    assert (two.step, two.high_step, two.samples, two.tokens) == (9, 9, 144, 9 * 256)
    assert two.productive_s == 9 * world.STEP_S
    assert (two.loss, two.loss_first, two.started_at) == (0.5, 1.0, 101.0)


def test_a_report_that_comes_twice_counts_once() -> None:
    one = progress.completed(progress.resumed(job(), 0, 100.0), steps(1, 8), 109.0)
    assert progress.completed(one, steps(5, 8), 110.0).productive_s == one.productive_s
    assert progress.completed(one, steps(5, 6), 110.0).step == 8


def test_steps_being_redone_move_the_step_and_the_clock_only() -> None:
    one = progress.completed(progress.resumed(job(), 0, 100.0), steps(1, 8), 109.0)
    two = progress.completed(progress.resumed(one, 4, 120.0), [world.step(5, at=121.0)], 122.0)
    assert (two.step, two.high_step, two.tokens, two.progress_at) == (5, 8, one.tokens, 121.0)


def test_steps_that_only_a_snapshot_knows_of_count_once() -> None:
    broken = dataclasses.replace(
        progress.completed(progress.resumed(job(), 0, 100.0), steps(1, 6), 107.0),
        incidents=(Incident(1, 1, None, "process_died", "", None, None, 6, 109.0, 2.0, ""),),
        attempt=2,
    )
    recent = [(1, step) for step in steps(3, 8)]
    known = progress.recalled(broken, recent)
    assert (known.high_step, known.samples, known.productive_s) == (8, 128, 8 * world.STEP_S)
    (incident,) = known.incidents
    assert (incident.step, incident.recover_s) == (8, None)  # it had gone so far, and is not over
    assert incident.detect_s == 2.0 - 2 * world.STEP_S
    assert progress.recalled(known, recent) is known
    after = progress.completed(progress.resumed(known, 8, 120.0), [world.step(9, at=121.0)], 122.0)
    assert (after.productive_s, after.redone_s) == (9 * world.STEP_S, 0.0)
    assert after.incidents[0].steps_redone == 0


def test_the_first_step_tells_where_the_attempt_continued() -> None:
    assert progress.completed(job(), steps(5, 6), 110.0).resumed_step == 4


def test_progress_is_not_later_than_its_report() -> None:
    assert progress.completed(job(), steps(1, 1), 100.5).progress_at == 100.5


def test_an_evaluation_told_again_replaces_the_old_one_and_counts_nothing() -> None:
    one = progress.completed(progress.resumed(job(), 0, 100.0), steps(1, 8), 109.0)
    first = Evaluated("a", 1, 8, 2.5, 99, 111.0, (("web", 2.5, 99),), (2, 2.0), 3)
    two = progress.evaluated(progress.evaluated(one, first), Evaluated("a", 1, 4, 2.25, 99, 112.0, (), (2, 2.0), 1))
    assert (two.eval_step, two.eval_loss, two.progress_at) == (4, 2.25, 112.0)
    assert (two.eval_best, two.eval_worse) == ((2, 2.0), 1)
    before = {"eval_step": None, "eval_loss": None, "eval_best": None, "eval_worse": 0, "progress_at": one.progress_at}
    assert dataclasses.replace(two, **before) == one


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_not_kept(loss: float) -> None:
    after = progress.completed(job(), steps(1, 1, loss=loss), 110.0)
    assert (after.loss, after.loss_first) == (None, None)


def test_the_speed_is_of_recent_steps() -> None:
    slow = [world.step(number, step_s=2.0) for number in range(1, 40)]
    fast = [world.step(number, step_s=1.0) for number in range(40, 80)]
    after = progress.completed(job(), slow + fast, 110.0)
    assert after.step_s == pytest.approx(1.0, abs=0.01)
    assert after.tokens_per_s == 256.0
