"""What is recorded of the steps of a job: their figures, which samples they had, how their attempts were laid out."""

from __future__ import annotations

import dataclasses
import itertools

from api.client import Client
from service.contracts.errors import NotFound, UserError
from service.contracts.status import JobView
from workers.spec import ParallelLayout


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """A step as the attempt that did it last measured it."""

    step: int
    attempt: int
    loss: float
    grad_norm: float
    samples: int  # consumed since the start of the run, this step's included


def steps(client: Client, job: JobView, first: int, last: int) -> list[Recorded]:
    """From `first` to `last`, all of them. NotFound: not done yet, or forgotten."""
    rows = itertools.takewhile(lambda row: row.step <= last, client.metrics(job.uid, first - 1))
    figures = {row.step: row.model_dump() for row in rows}
    if missing := [step for step in range(first, last + 1) if step not in figures]:
        raise _lack(job, missing[0])
    names = [field.name for field in dataclasses.fields(Recorded)]
    return [Recorded(**{name: figures[step][name] for name in names}) for step in range(first, last + 1)]


def _lack(job: JobView, step: int) -> NotFound:
    progress = job.status.progress
    if step <= progress.step:
        hint = "figures of a job that is over are forgotten after a while"
        return NotFound(f"nothing is recorded of step {step} of job {job.uid}", hint=hint)
    done = f"it has done {progress.step} of {progress.steps}"
    return NotFound(f"job {job.uid} has not done step {step} yet: {done}", hint="name a step that was completed")


def starts(found: list[Recorded], batch: int) -> tuple[int, ...]:
    """The number of each step's first sample. UserError where the run went back in between."""
    for one, other in itertools.pairwise(found):
        if other.samples - one.samples < batch:
            raise UserError(
                f"steps {one.step} and {other.step} are of two passes: the run went back, and has not done step "
                f"{other.step} again yet",
                hint=f"name step {one.step} or one before it, or wait",
            )
    return tuple(one.samples - batch for one in found)


def layouts(client: Client, uid: str) -> dict[int, ParallelLayout]:
    """Of each attempt that is known to have been placed."""
    placed = (event.data for event in client.events(uid) if event.type == "GangPlaced")
    return {
        int(data["attempt"]): ParallelLayout.model_validate(data["parallel"]) for data in placed if "parallel" in data
    }


def layout(known: dict[int, ParallelLayout], uid: str, attempt: int) -> ParallelLayout:
    if attempt not in known:
        raise NotFound(f"it is not known how attempt {attempt} of job {uid} was laid out", hint="its events are gone")
    return known[attempt]
