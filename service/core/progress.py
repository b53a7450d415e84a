"""What a job has done: where its attempt continued, its steps, each counted once over all attempts, its evaluations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from service.contracts.events import Evaluated, Step
from service.core import incidents
from service.core.state import Job, Tier

SMOOTHING = 0.2  # weight of the newest step in the time of recent ones


def resumed(job: Job, step: int, at: float, manifest: str | None = None, tier: Tier | None = None) -> Job:
    """The attempt continues after `step`, with the state from `tier`."""
    return dataclasses.replace(
        job,
        step=step,
        resumed_step=step,
        resumed_manifest=manifest,
        progress_at=max(job.progress_at, at),
        incidents=incidents.resumed(job.incidents, step, job.layout, tier),
    )


def recalled(job: Job, steps: Sequence[tuple[int, Step]]) -> Job:
    """What nobody had heard of was completed before its attempt broke, and counts. `steps`: each with its attempt."""
    new = [(attempt, step) for attempt, step in steps if step.step > job.high_step]
    if not new:
        return job
    attempt, last = new[-1]
    broken = incidents.caught_up(job.incidents, attempt, last.step, sum(step.step_s for _, step in new))
    return dataclasses.replace(_counted(job, [step for _, step in new]), incidents=broken)


def completed(job: Job, steps: Sequence[Step], at: float) -> Job:
    """The attempt completed `steps`, in order. A step that was completed before counts no more."""
    if job.resumed_step is None:  # the report of the resume was lost or is late
        job = resumed(job, steps[0].step - 1, at)
    new = list(_new(steps, job.high_step))
    last, before_s = steps[-1], job.progress_at
    job = dataclasses.replace(
        job,
        step=max(job.step, last.step),
        loss=last.loss if math.isfinite(last.loss) else None,
        tokens_per_s=last.tokens / last.step_s if last.step_s > 0 else job.tokens_per_s,
        step_s=_smoothed(job.step_s, steps),
        redone_s=job.redone_s + sum(step.step_s for step in steps) - sum(step.step_s for step in new),
        progress_at=max(job.progress_at, min(last.at, at)),
    )
    later_s = job.progress_at - before_s
    job = dataclasses.replace(job, incidents=incidents.caught_up(job.incidents, job.attempt, job.step, later_s))
    return _counted(job, new) if new else job


def evaluated(job: Job, event: Evaluated) -> Job:
    """The newest word counts: an attempt that does the step again says it again."""
    loss = event.loss if math.isfinite(event.loss) else None
    return dataclasses.replace(
        seen(job, event.at), eval_step=event.step, eval_loss=loss, eval_best=event.best, eval_worse=event.worse
    )


def ends_early(job: Job) -> bool:
    """Whether its evaluations have become no better for as long as it has patience."""
    asked = job.spec.eval
    return asked is not None and asked.enough(job.eval_worse) and job.step < job.spec.train.steps


def last_step(job: Job) -> int:
    """After which it is over, as far as is known."""
    return job.step if ends_early(job) or job.spec.evaluates_only else job.spec.train.steps


def best_kept(job: Job) -> int | None:
    """The step of the best evaluation, where its checkpoint is to stay."""
    keeps = job.spec.eval is not None and job.spec.eval.keep_best
    return job.eval_best[0] if keeps and job.eval_best else None


def seen(job: Job, at: float) -> Job:
    """The attempt works, though no step of it was completed."""
    return dataclasses.replace(job, progress_at=max(job.progress_at, at))


def _counted(job: Job, new: Sequence[Step]) -> Job:
    first, last = new[0], new[-1]
    return dataclasses.replace(
        job,
        high_step=last.step,
        quarantined=False,
        samples=last.samples,
        tokens=job.tokens + sum(step.tokens for step in new),
        productive_s=job.productive_s + sum(step.step_s for step in new),
        loss_first=first.loss if job.started_at is None and math.isfinite(first.loss) else job.loss_first,
        started_at=first.at if job.started_at is None else job.started_at,
        incidents=incidents.closed(job.incidents, job.attempt, first.at),
    )


def _new(steps: Sequence[Step], high: int) -> Iterator[Step]:
    for step in steps:
        if step.step > high:
            high = step.step
            yield step


def _smoothed(recent: float | None, steps: Sequence[Step]) -> float:
    for step in steps:
        recent = step.step_s if recent is None else recent + SMOOTHING * (step.step_s - recent)
    return recent or 0.0
