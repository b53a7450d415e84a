"""`phalanx replay`: what is done again and from where, and what is said where it can't be. No process is started."""

from __future__ import annotations

from typing import Any

import pytest

from api.cli import beginning, replay
from api.cli.replay import Plan
from service.contracts.job import InitFrom, Phase, parse_job
from service.store.records import CheckpointRow, MetricRow
from tests.api.commands import Run
from tests.api.world import World
from workers.spec import ParallelLayout

LAYOUTS = {1: ParallelLayout(dp=2, tp=2, micro_batch=2), 2: ParallelLayout(dp=4)}
EXACT = 0.1 + 0.2  # no short decimal


def placed(uid: str, attempt: int, layout: ParallelLayout) -> tuple[Any, ...]:
    data = {"attempt": attempt, "layout": str(layout), "parallel": layout.model_dump(mode="json")}
    return uid, 1.0, "GangPlaced", "", data


def row(uid: str, step: int, attempt: int = 1, samples: int | None = None) -> MetricRow:
    figures = {"loss": EXACT, "grad_norm": 1 / 3, "samples": 8 * step if samples is None else samples}
    return MetricRow(uid, step, attempt, 1.0, figures)


@pytest.fixture
def uid(world: World) -> str:
    """Six steps by attempt 1 with checkpoints at 2 and 4; steps 7 and 8 by attempt 2, which left out 16 samples."""
    uid = world.submit().uid
    for step in (2, 4):
        world.checkpoint(uid, step)
    rows = [*(row(uid, step) for step in range(1, 7)), *(row(uid, step, 2, 8 * step + 16) for step in (7, 8))]
    world.commit(events=[placed(uid, *one) for one in LAYOUTS.items()], metrics=rows)
    world.move(uid, Phase.RUNNING, step=8)
    return uid


def planned(world: World, uid: str, step: int, one: bool = False, since: int | None = None) -> Plan:
    with world.client() as client:
        job = client.get(uid)
        return replay.planned(client, job, parse_job(job.spec), step, one, since, None)


@pytest.mark.parametrize(
    ("step", "since", "manifest", "begin", "samples"),
    [
        (6, None, True, 4, (32, 40)),
        (5, None, True, 4, (32,)),
        (4, None, True, 2, (16, 24)),
        (2, None, False, 0, (0, 8)),
        (6, 2, True, 2, (16, 24, 32, 40)),
        (3, 0, False, 0, (0, 8, 16)),
        (8, None, True, 4, (32, 40, 64, 72)),
    ],
)
def test_where_it_begins_and_which_samples_the_steps_had(
    world: World, uid: str, step: int, since: int | None, manifest: bool, begin: int, samples: tuple[int, ...]
) -> None:
    stretch = planned(world, uid, step, since=since).stretch
    assert (stretch.begin, stretch.samples) == (begin, samples)
    assert stretch.manifest == (f"manifests/{begin:010d}-000001.json" if manifest else None)
    assert (stretch.root, stretch.job, stretch.device) == (world.root, uid, "cpu")


@pytest.mark.parametrize(
    ("step", "one", "layout", "other"),
    [
        (6, False, LAYOUTS[1], ""),
        (6, True, ParallelLayout(micro_batch=2), f"it was done as {LAYOUTS[1]}, and here as "),
        (8, False, LAYOUTS[2], "attempt 1 did some of the steps in another layout"),
    ],
)
def test_in_which_layout_and_whether_bits_may_differ(
    world: World, uid: str, step: int, one: bool, layout: ParallelLayout, other: str
) -> None:
    plan = planned(world, uid, step, one)
    assert plan.stretch.run.parallel == plan.layout == layout
    assert plan.other.startswith(other)
    assert bool(plan.other) == bool(other)


def test_figures_are_recorded_bit_for_bit(world: World, uid: str) -> None:
    found = planned(world, uid, 6).rows
    assert [(one.loss, one.grad_norm) for one in found] == [(EXACT, 1 / 3)] * 2


def test_a_fork_begins_at_the_other_jobs_checkpoint(world: World, uid: str) -> None:
    with world.client() as client:
        child = client.fork(uid, 4).uid
    world.commit(events=[placed(child, 1, LAYOUTS[1])], metrics=[row(child, 5)])
    world.move(child, Phase.RUNNING, step=5)
    stretch = planned(world, child, 5).stretch
    assert (stretch.begin, stretch.manifest, stretch.assignment(0).resume) == (4, None, ())
    assert stretch.origin == (f"{world.root}/{uid}", "manifests/0000000004-000001.json")


@pytest.mark.parametrize(
    ("start", "says"),
    [(None, "the seed"), (InitFrom(huggingface="/weights"), "the weights of /weights")],
)
def test_what_a_job_without_a_checkpoint_begins_with(start: InitFrom | None, says: str) -> None:
    assert str(beginning.of_job(start)) == says


def test_a_checkpoint_of_a_later_attempt_is_not_what_a_step_came_from(world: World, uid: str) -> None:
    world.checkpoint(uid, 5, attempt=2)
    assert planned(world, uid, 6).start.step == 4
    assert planned(world, uid, 7).start.step == 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--step", "9"), "has not done step 9 yet: it has done 8 of 20"),
        (("--step", "6", "--from", "6"), "step 6 is not before step 6"),
        (("--step", "6", "--from", "3"), "no checkpoint is of step 3"),
        (("--step", "6", "--from", "3"), "there are those of step 4, 2; 0: from the seed"),
        (("--step", "0"), "--step"),
    ],
)
def test_what_can_not_be_is_said(run: Run, uid: str, words: tuple[str, ...], says: str) -> None:
    done = run("replay", uid, *words)
    assert done.exit_code == 2
    assert says in done.output


def test_a_job_that_is_unknown(run: Run) -> None:
    done = run("replay", "nobody-0", "--step", "1")
    assert (done.exit_code, "nobody-0" in done.output) == (2, True)


def test_a_checkpoint_that_is_gone_or_rejected(world: World, run: Run, uid: str) -> None:
    with world.client() as client:
        gone = {one.step: one.manifest for one in client.checkpoints(uid)}
    (world.home / "runs" / uid / gone[4]).unlink()
    assert planned(world, uid, 6).start.step == 2
    assert "the checkpoint of step 4 is gone: it was removed" in run("replay", uid, "--step", "6", "--from", "4").output
    world.commit(checkpoints=[CheckpointRow(uid, 2, 1, gone[2], 1.0, "damaged")])
    assert planned(world, uid, 6).start.step == 0
    asked = run("replay", uid, "--step", "6", "--from", "2")
    assert "the checkpoint of step 2 is never used again: damaged" in asked.output


def test_steps_of_two_passes_and_figures_that_are_forgotten(world: World, run: Run, uid: str) -> None:
    world.commit(metrics=[row(uid, 5, 2, 8 * 5 + 16)])  # the run went back to step 4, and left samples out
    asked = run("replay", uid, "--step", "6")
    assert "steps 5 and 6 are of two passes" in asked.output
    bare = world.submit().uid
    world.move(bare, Phase.RUNNING, step=8)
    assert "nothing is recorded of step 6" in run("replay", bare, "--step", "6").output
    world.commit(metrics=[row(bare, 6)])
    assert "nothing is recorded of step 1 " in run("replay", bare, "--step", "6").output


def test_more_ranks_than_this_machine_can_be_trusted_with(world: World, run: Run) -> None:
    uid = world.submit({"resources.slots": 4096, "train.global_batch": 4096}).uid
    world.commit(events=[placed(uid, 1, ParallelLayout(dp=4096))], metrics=[row(uid, 1, samples=4096)])
    world.move(uid, Phase.RUNNING, step=1)
    asked = run("replay", uid, "--step", "1")
    assert (asked.exit_code, "4096 processes" in asked.output, "--one" in asked.output) == (2, True, True)
