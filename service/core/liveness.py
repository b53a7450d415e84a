"""How long an attempt may show no progress in each phase. Knows times only: an answer is no progress."""

from __future__ import annotations

import dataclasses
import math

from service.contracts.events import Fault
from service.contracts.job import Phase
from service.core import progress
from service.core.state import Job


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Seconds, where nothing else is said."""

    placing_s: float = 120.0
    probing_s: float = 300.0  # more, where a job has its nodes probed first
    starting_s: float = 180.0
    evaluated_s: float = 10.0  # and for each batch of a job that only evaluates: no step of it says how long one takes
    step_s: float = 60.0
    step_factor: float = 5.0  # times a recent step, where that is longer than step_s
    learned_s: float = 20.0  # instead of step_s, once an attempt has completed as many steps as `learned_steps`
    learned_steps: int = 50
    inspecting_s: float = 6.0  # from finding no progress to knowing who is waited for
    saving_s: float = 600.0  # after the last step: the last checkpoint
    pausing_s: float = 60.0  # and two steps: from PauseGang to its answer
    settle_s: float = 60.0  # a node has been there before a job grows onto it; doubles with each strike
    cooldown_s: float = 30.0  # a node that came back after a loss is not placed on; doubles with each strike
    strikes_window_s: float = 3600.0  # after which a strike is forgotten
    strikes_max: float = 5.0  # weight of strikes at which a node is excluded: a loss weighs 1, a dead rank a quarter
    storm_s: float = 10.0  # between restarts for the health of one node
    refusals_max: int = 3  # in a row, after which the node that refuses gets a strike
    probe: bool = False  # a node that came back after a loss is not placed on before a probe has passed


DEFAULT = Limits()


def limit(phase: Phase, job: Job, limits: Limits = DEFAULT) -> float:
    """Seconds without progress after which the attempt is broken; infinite where nothing of it runs."""
    if phase is Phase.PLACING:
        return limits.placing_s + (limits.probing_s if probes(job) else 0.0)
    if phase is Phase.STARTING:
        batches = job.spec.batches_evaluated if job.spec.evaluates_only else 0
        return limits.starting_s + limits.evaluated_s * batches
    if phase is not Phase.RUNNING:
        return math.inf
    known = job.resumed_step is not None and job.step - job.resumed_step >= limits.learned_steps
    least = min(limits.step_s, limits.learned_s) if known else limits.step_s
    learned = max(least, limits.step_factor * (job.step_s or 0.0))
    learned += _evaluation_s(job)
    return max(learned, limits.saving_s) if job.step >= progress.last_step(job) else learned


def probes(job: Job) -> bool:
    """Whether nodes are probed before its next attempt: only before its first step. Later a job would wait for that."""
    return job.spec.resources.probe and job.started_at is None


def _evaluation_s(job: Job) -> float:
    """What an evaluation after the newest step takes at most: each of its batches less than a step."""
    due = job.spec.eval is not None and job.spec.eval.due(job.step, job.spec.train.steps)
    return job.spec.batches_evaluated * (job.step_s or 0.0) if due else 0.0


def overdue(job: Job, at: float, limits: Limits = DEFAULT) -> Fault | None:
    """The fault of an attempt that has shown no progress for too long."""
    allowed, silent = limit(job.phase, job, limits), at - max(job.progress_at, job.watched_at)
    if silent <= allowed:
        return None
    # The first line is the same each time, so that a repeated hang is recognised.
    numbers = f"{silent:.1f} s since the last progress; the limit is {allowed:.1f} s"
    if job.phase is Phase.RUNNING:
        return Fault("hang", f"no progress within the limit of a step\n{numbers}", step=job.step)
    return Fault("start_failed", f"no progress within the limit of {job.phase}\n{numbers}", step=job.step)
