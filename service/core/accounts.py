"""Where a job's time went: its steps, and each phase without a step, once. What incidents have and what no incident has
adds up to its whole wall clock. Knows one job; decides nothing.

A phase ends with the event that leads to the next; where an attempt broke, its last part is detection, which begins at
the last progress. What is left over is between the steps of a gang at work: saving, evaluating, and the answer to a
pause.
"""

from __future__ import annotations

import dataclasses

from service.contracts.job import Phase
from service.core.state import Incident, Job, Spent

PLANNED = "planned"
GOING = "going"
"""The stage of a gang that makes steps: counted by them, not by the clock."""


@dataclasses.dataclass(frozen=True, slots=True)
class Accounts:
    """Seconds; they add up to the time from submission to the end, or to now."""

    productive_s: float
    redone_s: float
    detect_s: float
    spent: Spent
    between_s: float

    @property
    def total_s(self) -> float:
        return self.productive_s + self.redone_s + self.detect_s + self.spent.total_s + self.between_s


def accounts(job: Job, end: float) -> Accounts:
    """`end`: when the job ended, or now."""
    spent = job.spent
    for incident in job.incidents:
        spent = _sum(spent, incident.spent)
    if (now := _stage(job)) not in (None, GOING):
        spent = _more(spent, str(now), max(0.0, end - job.stage_at))
    detect_s = sum(incident.detect_s for incident in job.incidents)
    known = job.productive_s + job.redone_s + detect_s + spent.total_s
    return Accounts(job.productive_s, job.redone_s, detect_s, spent, end - job.submitted_at - known)


def counted(before: Job | None, after: Job, at: float) -> Job:
    """The job with the stage that this event ended booked."""
    if before is None:
        return dataclasses.replace(after, stage_at=at, slots_at=at)
    if len(before.held) != len(after.held):
        after = dataclasses.replace(after, slot_s=slot_seconds(before, at), slots_at=at)
    stage, then = _stage(before), _stage(after)
    if stage == then:
        if before.stopping and after.progress_at > before.progress_at:  # a step was completed after all
            return dataclasses.replace(after, stage_at=max(after.stage_at, min(after.progress_at, at)))
        return after
    if stage is None or stage == GOING:
        return dataclasses.replace(after, stage_at=at)
    end = at
    if then == GOING:
        end = max(before.stage_at, min(at, after.progress_at))
    elif len(after.incidents) > len(before.incidents):
        end = max(before.stage_at, at - after.incidents[-1].detect_s)
    steps_s = after.productive_s + after.redone_s - before.productive_s - before.redone_s
    seconds = max(0.0, end - before.stage_at - steps_s)
    return _booked(dataclasses.replace(after, stage_at=end if then == GOING else at), before, stage, seconds)


def lost(job: Job) -> dict[str, float]:
    """Slot-seconds that incidents took, by their cause, or `planned` for a move: of the slots that were at work before,
    from the last progress to the next step."""
    found: dict[str, float] = {}
    for incident in job.incidents:
        name = incident.cause.value if incident.cause else PLANNED
        slots = incident.before.world if incident.before else len(job.held)
        found[name] = found.get(name, 0.0) + slots * (incident.detect_s + incident.spent.total_s)
    return found


def slot_seconds(job: Job, at: float) -> float:
    """That the job has held slots until `at`, each counted: of ranks, of spares, and what was kept."""
    return job.slot_s + len(job.held) * max(0.0, at - job.slots_at)


def _stage(job: Job) -> str | None:
    if job.phase.terminal:
        return None
    if job.placement is None:
        return "suspended_s" if job.phase is Phase.SUSPENDED else "place_s"
    if job.stopping:
        return "stop_s"
    if job.phase not in (Phase.PLACING, Phase.STARTING):
        return GOING
    if job.resumed_step is not None:
        return "first_step_s"
    return "start_s" if job.phase is Phase.PLACING else "load_s"


def _booked(job: Job, before: Job, stage: str, seconds: float) -> Job:
    """On the newest incident that was open then, or on the job."""
    number = next((one.number for one in reversed(before.incidents) if one.recover_s is None), None)
    if number is None:
        return dataclasses.replace(job, spent=_more(job.spent, stage, seconds))

    def with_it(incident: Incident) -> Incident:
        if incident.number != number:
            return incident
        return dataclasses.replace(incident, spent=_more(incident.spent, stage, seconds))

    return dataclasses.replace(job, incidents=tuple(map(with_it, job.incidents)))


def _more(spent: Spent, stage: str, seconds: float) -> Spent:
    return dataclasses.replace(spent, **{stage: getattr(spent, stage) + seconds})


def _sum(one: Spent, other: Spent) -> Spent:
    return Spent(*(getattr(one, field.name) + getattr(other, field.name) for field in dataclasses.fields(Spent)))
