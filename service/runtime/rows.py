"""What one turn of the controller writes to the store: state, event rows, metrics, logs, in one transaction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from service.contracts.cluster import Fleet, NodeHealth
from service.contracts.events import (
    CancelRequested,
    CheckpointPublished,
    CheckpointVerified,
    Evaluated,
    Event,
    NodeForgiven,
    Request,
    RescaleRequested,
    RestartRequested,
    RestoreRequested,
    ResumeRequested,
    SaveRequested,
    SpecChanged,
    Step,
    StepsCompleted,
    StepsRecalled,
    SuspendRequested,
)
from service.contracts.job import parse_job
from service.core import checkpoints as told
from service.core import codec, status
from service.core.commands import Record
from service.core.state import Job
from service.runtime.logs import Chunk
from service.store.records import Changes, CheckpointRow, Intent, JobUpdate, LogChunk, MetricRow, NodeRow, TimesRow
from workers.checkpoint.manifest import key_of
from workers.spec import ParallelLayout

LARGEST = 700.0  # loss whose perplexity is still a float


def job(job: Job) -> JobUpdate:
    told = status.status(job).model_dump(mode="json")
    return JobUpdate(job.uid, job.phase.value, job.reason, told, codec.dump(job), job.ended_at)


def metrics(events: Iterable[Event]) -> list[MetricRow]:
    """In the order of what happened; an evaluation's figures go beside those of its step."""
    rows = []
    for event in events:
        if isinstance(event, StepsCompleted):
            rows += [MetricRow(event.uid, step.step, event.attempt, step.at, _figures(step)) for step in event.steps]
        elif isinstance(event, StepsRecalled):
            rows += [
                MetricRow(event.uid, step.step, attempt, step.at, _figures(step), recalled=True)
                for attempt, step in event.steps
            ]
        elif isinstance(event, Evaluated):
            rows.append(MetricRow(event.uid, event.step, event.attempt, event.at, _evaluation(event), beside=True))
    return rows


def checkpoints(events: Iterable[Event], records: Iterable[Record]) -> list[CheckpointRow]:
    """What was published and verified is known by the events; what is never tried again the core decides."""
    rows = []
    for event in events:
        if isinstance(event, CheckpointPublished):
            name = (event.uid, event.step, event.attempt, event.manifest, event.at)
            rows.append(CheckpointRow(*name, nbytes=event.nbytes or None))
        elif isinstance(event, CheckpointVerified):
            name = (event.uid, event.step, event.attempt, event.manifest, event.at)
            rows.append(CheckpointRow(*name, verified_at=event.at))
    for record in records:
        if record.type == told.REJECTED:
            manifest = record.data["manifest"]
            rows.append(CheckpointRow(record.uid, *key_of(manifest), manifest, record.at, record.data["why"]))
    return rows


def restore(intent: Intent, known: Iterable[CheckpointRow], at: float) -> RestoreRequested:
    """The event of a wish to go back; `known` are the job's checkpoints."""
    step, attempt = intent.data["step"], intent.data["attempt"]
    newer = tuple(row.manifest for row in known if (row.step, row.attempt) > (step, attempt) and not row.rejected)
    skip = int(intent.data.get("skip_samples") or 0)
    return RestoreRequested(intent.job, step, attempt, intent.data["manifest"], newer, at, skip)


def _evaluation(event: Evaluated) -> dict[str, Any]:
    by_source = {name: _measured(loss, tokens) for name, loss, tokens in event.sources}
    whole = {f"eval_{name}": value for name, value in _measured(event.loss, event.tokens).items()}
    return whole | ({"eval": by_source} if by_source else {})


def _measured(loss: float, tokens: int) -> dict[str, float]:
    """Perplexity: the exponential of the mean loss by token."""
    perplexity = math.exp(loss) if loss < LARGEST else math.inf
    return {"loss": loss, "tokens": tokens, "perplexity": perplexity}


def _figures(step: Step) -> dict[str, Any]:
    figures = {name: value for name, value in dataclasses.asdict(step).items() if name not in ("step", "at")}
    if step.tokens_per_s is None and step.step_s > 0:
        figures["tokens_per_s"] = step.tokens / step.step_s
    return figures


def request(intent: Intent, at: float) -> Request:
    """The event of a wish about a job."""
    uid, data = intent.job, intent.data
    match intent.kind:
        case "rescale":
            layout = None if data.get("layout") is None else ParallelLayout.model_validate(data["layout"])
            return RescaleRequested(uid, int(data["slots"]), layout, at)
        case "change":
            return SpecChanged(uid, parse_job(data["spec"]), int(data["generation"]), at)
        case "suspend":
            return SuspendRequested(uid, at)
        case "resume":
            return ResumeRequested(uid, at)
        case "save":
            return SaveRequested(uid, at)
        case "restart":
            return RestartRequested(uid, at)
        case _:
            return CancelRequested(uid, at, bool(data.get("graceful")))


def nodes(fleet: Fleet, at: float) -> list[NodeRow]:
    return [NodeRow(**dataclasses.asdict(node), seen_at=at) for node in fleet.nodes]


def chunk(uid: str, chunk: Chunk) -> LogChunk:
    return LogChunk(uid, chunk.attempt, chunk.node, chunk.path, chunk.lines, chunk.at)


def times(uid: str, attempt: int, told: Mapping[str, Any], at: float) -> TimesRow:
    return TimesRow(uid, at, attempt, told["step"], told["parts"])


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """What is told of jobs and decides nothing."""

    chunks: Sequence[LogChunk] = ()
    times: Sequence[TimesRow] = ()

    def __bool__(self) -> bool:
        return bool(self.chunks or self.times)


def changes(
    jobs: Iterable[Job],
    records: Sequence[Record],
    events: Sequence[Event],
    beside: Beside,
    intents: Sequence[int],
    fleet: Fleet | None,
    at: float,
    health: Mapping[str, NodeHealth] | None = None,
) -> Changes:
    return Changes(
        jobs=[job(one) for one in jobs],
        events=[(record.uid, record.at, record.type, record.reason, dict(record.data)) for record in records],
        metrics=metrics(events),
        times=beside.times,
        log_chunks=beside.chunks,
        checkpoints=checkpoints(events, records),
        intents_done=intents,
        nodes=None if fleet is None else nodes(fleet, at),
        health=None if health is None else codec.dump_health(health),
        forgiven=tuple(event.node for event in events if isinstance(event, NodeForgiven)),
    )
