"""The main job on a real fleet: trained in 3D, a rank killed, recovered, finished; and what is left of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.contracts.job import Cause, Phase, parse_job
from tests.e2e.world import JOB, World, until
from tests.pool import Pool
from tests.workers import runs
from workers.reports import StepDone
from workers.spec import ParallelLayout

pytestmark = [pytest.mark.ray, pytest.mark.torch]


def test_a_killed_rank_changes_no_loss(world: World, pool: Pool, tmp_path: Path) -> None:
    spec = parse_job(JOB)
    undisturbed, *_ = pool.run(8, runs.train, str(tmp_path), spec.run(ParallelLayout(dp=2, pp=2, tp=2)), 1, ())
    hit = world.submit(name="hit", checkpoint={"snapshot_every": 0})  # back from storage
    saved = world.saved(hit, 16)  # one may be under way: it is lost with the rank, or published just in time
    world.kill(hit, attempt=1, rank=5, after=17)
    view = world.finish(hit)

    expected = {report.step: report.loss for report in undisturbed if isinstance(report, StepDone)}
    assert world.losses(hit) == expected  # bit-equal, the redone steps too
    assert list(expected) == list(range(1, 33))
    assert view.status.progress.loss == expected[32]
    assert view.status.attempt == 2
    (incident,) = view.status.incidents
    assert (incident.cause, incident.kind, incident.rank) == (Cause.INFRASTRUCTURE, "process_died", 5)
    assert incident.detect_s < 2.0
    assert incident.steps_redone is not None
    went_on = incident.step - incident.steps_redone
    assert went_on >= saved
    assert went_on % 8 == 0  # at a checkpoint
    assert incident.recover_s is not None
    assert 0 < view.goodput < 1
    assert not view.status.holds_slots

    _every_sample_once(Path(view.storage), samples=32 * 8)
    lines = [line for line in world.client.logs(hit) if line.rank == 0]
    assert {line.attempt for line in lines} == {1, 2}
    assert any(line.text.startswith("step 32 ") for line in lines)  # readable, though the processes are gone
    assert not world.processes("ray::Rank")


def _every_sample_once(storage: Path, samples: int) -> None:
    manifests = sorted((storage / "manifests").glob("*.json"))
    assert len(manifests) == 3  # keep
    ledger = json.loads(manifests[-1].read_text())["header"]["ledger"]
    assert [entry["start"] for entry in ledger] == [0, *(entry["end"] for entry in ledger[:-1])]
    assert ledger[-1]["end"] == samples


def test_jobs_wait_for_slots_with_a_reason_and_cancel_frees_them(world: World) -> None:
    first = world.submit(name="first", train={"steps": 100_000})
    second = world.submit(
        name="second", train={"steps": 3}, parallel={"dp": 1, "pp": 2, "tp": 2}, resources={"slots": 4}
    )
    world.reach(first, 2)
    waiting = world.client.get(second)
    assert waiting.phase is Phase.QUEUED
    assert "needs 4 slots" in waiting.reason
    assert first in waiting.reason
    pids = world.pids(first, attempt=1)

    world.client.cancel(first)
    ended = world.phase(first, Phase.CANCELLED)
    assert not ended.status.holds_slots
    assert not [process for process in world.processes("ray::Rank") if process.pid in pids]
    world.finish(second)


def test_cancel_while_the_gang_starts(world: World) -> None:
    uid = world.submit(name="early")
    world.phase(uid, Phase.PLACING)
    world.client.cancel(uid)
    world.phase(uid, Phase.CANCELLED)
    until(lambda: not world.processes("ray::NodeAgent"), "end of the agent's process", 10)
    until(lambda: not world.processes("ray::Rank"), "end of processes that were not ranks yet", 5)


def test_a_user_error_at_start_fails_with_its_reason(world: World, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\nnot json\n')
    one = {"parallel": {"dp": 1, "pp": 1, "tp": 1}, "resources": {"slots": 1}}
    uid = world.submit(name="bad", data={"source": str(bad)}, budgets={"user_error": 1}, **one)
    view = world.phase(uid, Phase.FAILED)
    assert view.status.incidents[-1].cause is Cause.USER_ERROR
    assert "bad.jsonl:2 is not JSON" in view.reason
    trace = until(
        lambda: [line.text for line in world.client.logs(uid) if "DataError" in line.text], "traceback in the logs"
    )
    assert trace
