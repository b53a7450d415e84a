"""`phalanx replay`: steps of a job once more, on this machine, to tell hardware from code. The job is only read."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from typing import Annotated, Any

import typer

from api.cli import beginning, connection, recorded, redoing, show, tables, verdict
from api.cli.beginning import Beginning
from api.cli.jobs import Uid
from api.cli.recorded import Recorded
from api.client import Client
from service.contracts.errors import UserError
from service.contracts.job import JobSpec, parse_job
from service.contracts.status import JobView
from workers.spec import ParallelLayout
from workers.stretch import Redone, Stretch

app = typer.Typer()


class Device(enum.StrEnum):
    CPU = "cpu"
    GPU = "gpu"


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is done again, and how it was done."""

    start: Beginning
    rows: list[Recorded]
    layout: ParallelLayout
    stretch: Stretch
    other: str  # what is not as it was then

    def __str__(self) -> str:
        first, last = self.rows[0].step, self.rows[-1].step
        steps = f"step {last}" if first == last else f"steps {first} to {last}"
        return f"{steps} once more from {self.start}, as {self.layout}"


@app.command()
def replay(
    context: typer.Context,
    uid: Uid,
    step: Annotated[int, typer.Option(min=1, help="that was completed")],
    one: Annotated[bool, typer.Option("--one", help="in one process, whatever the layout was")] = False,
    since: Annotated[
        int | None, typer.Option("--from", min=0, metavar="STEP", help="of a checkpoint; 0: where the job began")
    ] = None,
    device: Annotated[Device | None, typer.Option(help="default: the job's")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object, and nothing else")] = False,
) -> None:
    """Do a step again on this machine, from the newest checkpoint before it, and compare loss and grad_norm with what
    was recorded. Nothing is saved. Exit code 1: it is not what it was."""
    client, out = connection.client(context), show.console()
    job = client.get(uid)
    spec = parse_job(job.spec)
    plan = planned(client, job, spec, step, one, since, device)
    if device is not Device.GPU:
        redoing.check_size(plan.layout.world, str(plan.layout))
    if not as_json:
        out.print(f"{plan}; the job is only read", soft_wrap=True)
    progress = show.console(stderr=True)

    def told(redone: Redone) -> None:
        if not as_json:
            progress.print(f"step {redone.step} of {step}")

    found = verdict.compared(redoing.redone(plan.stretch, spec.runtime, told), plan.rows)
    judgement = verdict.judged(found, spec.train.precision, plan.other)
    if as_json:
        typer.echo(_document(uid, plan, found, judgement))
    else:
        out.print(tables.replayed(found))
        out.print(judgement.sentence, soft_wrap=True)
    if judgement.kind == "differs":
        raise typer.Exit(1)


def planned(
    client: Client, job: JobView, spec: JobSpec, step: int, one: bool, since: int | None, device: str | None
) -> Plan:
    """UserError and NotFound say what is missing, and what would work."""
    (last,) = recorded.steps(client, job, step, step)
    own, first = client.checkpoints(job.uid), beginning.of_job(spec.init_from)
    if step <= first.step:
        raise UserError(f"job {job.uid} began after step {first.step}", hint=f"step {step} is of the job it came from")
    if since is None:
        start = beginning.newest(own, first, step, last.attempt)
    else:
        start = beginning.named(own, first, since, step, last.attempt)
    rows = recorded.steps(client, job, start.step + 1, step)
    known = recorded.layouts(client, job.uid)
    then = recorded.layout(known, job.uid, last.attempt)
    layout = alone(then) if one else then
    chosen = device or spec.resources.device
    others = {row.attempt for row in rows if known.get(row.attempt) != layout}
    stretch = Stretch(
        run=spec.run(layout),
        job=job.uid,
        root=job.storage.removesuffix(f"/{job.uid}"),
        manifest=start.manifest,
        origin=start.origin,
        weights=start.weights,
        begin=start.step,
        samples=recorded.starts(rows, spec.train.global_batch),
        device=chosen,
    )
    return Plan(start, rows, layout, stretch, _other(layout, then, others, chosen, spec.resources.device))


def alone(layout: ParallelLayout) -> ParallelLayout:
    """One process that computes the same micro-batches."""
    return ParallelLayout(micro_batch=layout.micro_batch, recompute=layout.recompute)


def _other(layout: ParallelLayout, then: ParallelLayout, others: set[int], device: str, wanted: str) -> str:
    if device != wanted:
        return f"it was done on a {wanted}, and here on a {device}"
    if layout != then:
        return f"it was done as {then}, and here as {layout}"
    if others:
        return f"attempt {min(others)} did some of the steps in another layout"
    return ""


def _document(uid: str, plan: Plan, found: list[verdict.Compared], judgement: verdict.Verdict) -> str:
    """What is not finite is null."""
    steps = [{**dataclasses.asdict(one), "same": one.same, "apart": one.apart} for one in found]
    start = {"step": plan.start.step, "manifest": plan.start.manifest, "name": str(plan.start)}
    layout, told = plan.layout.model_dump(mode="json"), dataclasses.asdict(judgement)
    return json.dumps(
        {
            "job": uid,
            "start": start,
            "layout": layout,
            "steps": [_finite(one) for one in steps],
            "verdict": _finite(told),
        }
    )


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
