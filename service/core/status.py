"""What is told of a job, made from what the core remembers of it."""

from __future__ import annotations

import dataclasses
import re

from service.contracts.job import Phase
from service.contracts.status import ConditionView, ExitView, IncidentView, JobStatus, Progress, RankPlace
from service.core import accounts, queue
from service.core.state import Incident, Job

SIGNAL = re.compile(r"\bsignal (\d+)")


def status(job: Job) -> JobStatus:
    """All that does not depend on the clock."""
    slots = job.placement.slots if job.placement else ()
    return JobStatus(
        observed_generation=job.generation,
        conditions=tuple(ConditionView(**dataclasses.asdict(one)) for one in job.conditions),
        position=job.position if job.placement is None and job.phase in queue.WAITING else None,
        exit=_exit(job),
        attempt=job.attempt,
        layout=job.layout,
        progress=_progress(job),
        productive_s=job.productive_s,
        slot_s=job.slot_s,
        lost_slot_s=accounts.lost(job),
        slots=len(job.held),
        slots_at=job.slots_at,
        placement=tuple(RankPlace(rank=rank, node=at.name, slot=at.index) for rank, at in enumerate(slots)),
        spares=tuple(dict.fromkeys(slot.name for slot in job.placement.spares)) if job.placement else (),
        wanted_slots=job.wanted_slots,
        standbys=0 if job.phase.terminal else job.standbys,
        incidents=tuple(map(incident, job.incidents)),
        checkpoint_step=job.checkpoint_step,
        checkpoint=job.checkpoint,
        snapshot_step=None if job.phase.terminal else job.snapshot_step,
        snapshot_bytes=0 if job.phase.terminal else job.snapshot_bytes,
        holds_slots=job.holds_slots,
    )


def _progress(job: Job) -> Progress:
    running = job.phase is Phase.RUNNING and job.step_s is not None
    return Progress(
        step=job.step,
        steps=job.spec.train.steps,
        samples=job.samples,
        tokens=job.tokens,
        loss=job.loss,
        loss_first=job.loss_first,
        eval_loss=job.eval_loss,
        eval_step=job.eval_step,
        eval_best=None if job.eval_best is None else job.eval_best[1],
        eval_best_step=None if job.eval_best is None else job.eval_best[0],
        tokens_per_s=job.tokens_per_s,
        eta_s=max(0, job.spec.train.steps - job.step) * (job.step_s or 0.0) if running else None,
    )


def _exit(job: Job) -> ExitView | None:
    if job.phase is not Phase.FAILED or not job.incidents:
        return None
    last = job.incidents[-1]
    if last.action != job.reason:  # it was not what ended the job
        return None
    root = last.faults[0] if last.faults else None
    signal = SIGNAL.search(last.message)
    return ExitView(
        kind=last.kind,
        message=last.message,
        rank=last.rank,
        node=last.node,
        step=last.step,
        out_of_memory=last.kind == "out_of_memory",
        signal=int(signal[1]) if signal else None,
        traceback=root.traceback if root else "",
    )


def incident(one: Incident) -> IncidentView:
    own = {name: getattr(one, name) for name in IncidentView.model_fields if hasattr(one, name)}
    spent = dataclasses.asdict(one.spent)
    return IncidentView(**own, **spent, layout_before=one.before, layout_after=one.after)
