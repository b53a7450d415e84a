from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from service.contracts import events
from service.contracts.cluster import Fleet, Node, NodeHealth
from service.contracts.events import Event
from service.contracts.job import Phase
from service.core import checkpoints, codec, status
from service.core.commands import Record
from service.runtime import rows
from service.runtime.logs import Chunk
from service.store.records import Changes, CheckpointRow, Intent, LogChunk, MetricRow, NodeRow, TimesRow
from tests.service.core import world
from tests.service.core.world import World
from workers.checkpoint import manifest

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("phase", Phase)
def test_a_job_is_a_row_that_the_next_controller_can_read(phase: Phase) -> None:
    job = World(world.fleet(2)).bring(phase)
    row = rows.job(job)
    assert (row.uid, row.phase, row.reason, row.ended_at) == (job.uid, phase.value, job.reason, job.ended_at)
    assert codec.load(json.loads(json.dumps(row.core))) == job
    assert json.loads(json.dumps(row.status)) == status.status(job).model_dump(mode="json")


def steps(*done: events.Step, attempt: int = 1) -> events.StepsCompleted:
    return events.StepsCompleted("a", attempt, done, 200.0)


def figures(step: int, rate: float | None, step_s: float = 0.5, **measured: Any) -> dict[str, Any]:
    known = {"loss": 1.0, "grad_norm": 0.1, "learning_rate": 1e-3, "tokens": 256, "samples": 16 * step}
    return {**known, "step_s": step_s, "tokens_per_s": rate, "mfu": None, "parts": {}, **UNMEASURED} | measured


UNMEASURED: dict[str, Any] = {"bubble": 0.0, "memory": None, "traffic": None}
MEASURED: dict[str, Any] = {"mfu": 0.41, "parts": {"data": 0.1, "forward_backward": 0.3, "optimizer": 0.1}}
EVALUATED = {
    "eval_loss": 0.0,
    "eval_tokens": 4096,
    "eval_perplexity": 1.0,
    "eval": {
        "web": {"loss": 0.0, "tokens": 4000, "perplexity": 1.0},
        "code": {"loss": 1000.0, "tokens": 96, "perplexity": math.inf},  # no float holds it
    },
}
METRICS = [
    ([], []),
    ([events.Ticked(1.0), events.GangStarted("a", 1, 1.0)], []),
    ([steps(world.step(1, 101.0))], [MetricRow("a", 1, 1, 101.0, figures(1, 512.0))]),
    ([steps(world.step(1, 101.0, step_s=0.0))], [MetricRow("a", 1, 1, 101.0, figures(1, None, 0.0))]),
    (
        [steps(dataclasses.replace(world.step(1, 101.0), tokens_per_s=500.0, **MEASURED))],
        [MetricRow("a", 1, 1, 101.0, figures(1, 500.0, **MEASURED))],
    ),
    (
        [steps(world.step(1, 101.0), world.step(2, 102.0)), steps(world.step(2, 112.0), attempt=2)],
        [
            MetricRow("a", 1, 1, 101.0, figures(1, 512.0)),
            MetricRow("a", 2, 1, 102.0, figures(2, 512.0)),
            MetricRow("a", 2, 2, 112.0, figures(2, 512.0)),
        ],
    ),
    (
        [
            steps(world.step(1, 101.0)),
            events.Evaluated("a", 1, 1, 0.0, 4096, 105.0, (("web", 0.0, 4000), ("code", 1000.0, 96))),
            steps(world.step(2, 112.0)),
        ],
        [
            MetricRow("a", 1, 1, 101.0, figures(1, 512.0)),
            MetricRow("a", 1, 1, 105.0, EVALUATED, beside=True),
            MetricRow("a", 2, 1, 112.0, figures(2, 512.0)),
        ],
    ),
]


@pytest.mark.parametrize(("happened", "written"), METRICS)
def test_steps_are_metrics(happened: list[Event], written: list[MetricRow]) -> None:
    assert rows.metrics(happened) == written


@pytest.mark.parametrize(("step", "attempt"), [(0, 1), (300, 2), (12_345_678_901, 1_234_567)])
def test_checkpoints_published_and_rejected_are_the_same_row(step: int, attempt: int) -> None:
    path = manifest.path(step, attempt)
    published = events.CheckpointPublished("a", attempt, step, path, 100.0, nbytes=512)
    verified = events.CheckpointVerified("a", attempt, step, path, 150.0)
    rejected = checkpoints.record(events.CheckpointRejected("a", attempt + 1, path, "torn", 200.0))
    other = Record("a", "JobRunning", "it runs", 5.0, {})
    assert rows.checkpoints([published, events.Ticked(1.0), verified], [other, rejected]) == [
        CheckpointRow("a", step, attempt, path, 100.0, nbytes=512),
        CheckpointRow("a", step, attempt, path, 150.0, verified_at=150.0),
        CheckpointRow("a", step, attempt, path, 200.0, "torn"),
    ]


def test_a_wish_to_go_back_names_what_is_newer_and_not_rejected_yet() -> None:
    names = [(30, 2, None), (30, 1, None), (20, 2, None), (20, 1, None), (25, 1, "torn"), (10, 1, None)]
    known = [CheckpointRow("a", step, attempt, manifest.path(step, attempt), 1.0, why) for step, attempt, why in names]
    intent = Intent(1, "a", "restore", 1.0, {"step": 20, "attempt": 1, "manifest": manifest.path(20, 1)})
    newer = tuple(manifest.path(*name) for name in [(30, 2), (30, 1), (20, 2)])
    asked = events.RestoreRequested("a", 20, 1, manifest.path(20, 1), newer, 7.0)
    assert rows.restore(intent, known, 7.0) == asked
    skipping = dataclasses.replace(intent, data={**intent.data, "skip_samples": 32})
    assert rows.restore(skipping, known, 7.0) == dataclasses.replace(asked, skip=32)


def test_nodes() -> None:
    node = Node("id", "n1", 8, "r1", "z1", "gpu", "10.0.0.7")
    assert rows.nodes(Fleet((node,)), 7.0) == [NodeRow("id", "n1", 8, "r1", "z1", "gpu", "10.0.0.7", 7.0)]
    assert rows.nodes(Fleet(), 7.0) == []


def test_a_chunk_of_a_log() -> None:
    assert rows.chunk("a", Chunk(2, "n1", "logs/x", 3, 7.0)) == LogChunk("a", 2, "n1", "logs/x", 3, 7.0)


def test_a_turn_that_changes_nothing() -> None:
    nothing = Changes([], [], [], log_chunks=(), checkpoints=[], intents_done=[])
    assert rows.changes([], [], [], rows.Beside(), [], None, 7.0) == nothing


def test_all_of_a_turn() -> None:
    job = World(world.fleet(2)).bring(Phase.RUNNING)
    record = Record("a", "JobRunning", "it runs", 5.0, {"step": 1})
    published = events.CheckpointPublished("a", 1, 4, manifest.path(4, 1), 100.0)
    happened: list[Event] = [steps(world.step(1, 101.0)), published, events.NodeForgiven("n1", 100.0)]
    chunks = [LogChunk("a", 1, "n1", "logs/x", 3, 7.0)]
    times = [rows.times("a", 1, {"step": 4, "parts": {"data": [0.1]}}, 7.0)]
    beside = rows.Beside(chunks, times)
    made = rows.changes([job], [record], happened, beside, [3], world.fleet(1), 7.0, {"n0": NodeHealth()})
    assert made == Changes(
        jobs=[rows.job(job)],
        events=[("a", 5.0, "JobRunning", "it runs", {"step": 1})],
        metrics=rows.metrics(happened),
        times=[TimesRow("a", 7.0, 1, 4, {"data": [0.1]})],
        log_chunks=chunks,
        checkpoints=rows.checkpoints(happened, [record]),
        intents_done=[3],
        nodes=rows.nodes(world.fleet(1), 7.0),
        health=codec.dump_health({"n0": NodeHealth()}),
        forgiven=("n1",),
    )
    assert all(getattr(made, field.name) for field in dataclasses.fields(made))
