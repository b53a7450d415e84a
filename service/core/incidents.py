"""Incidents from fault to recovery: opened by a fault, settled by a resume, closed by a new step.

Knows what a fault cost; decides nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from service.contracts.events import Fault
from service.core import recovery
from service.core.state import Incident, Job, Pause, Tier
from workers.spec import ParallelLayout

ECHOES_KEPT = 7
"""Hundreds of ranks say the same; an incident keeps its root and a few of them."""


def opened(job: Job, verdict: recovery.Verdict, faults: Sequence[Fault], at: float) -> Incident:
    root = verdict.root
    echoes = [fault for fault in faults if fault is not root]
    return Incident(
        number=len(job.incidents) + 1,
        attempt=job.attempt,
        cause=verdict.cause,
        kind=root.kind,
        message=root.message,
        rank=root.rank,
        node=root.node,
        step=job.step,
        faulted_at=recovery.faulted_at(root, job.progress_at, at),
        detect_s=max(0.0, at - job.progress_at),
        action=verdict.reason,
        faults=(root, *echoes[:ECHOES_KEPT]),
        before=job.layout,
    )


def moved(job: Job, pause: Pause, reason: str, at: float) -> Incident:
    """A gang that left its slots on purpose, at nobody's cost."""
    return Incident(
        number=len(job.incidents) + 1,
        attempt=job.attempt,
        cause=None,
        kind=pause.kind,
        message=pause.reason,
        rank=None,
        node=pause.node,
        step=job.step,
        faulted_at=min(job.progress_at, at),
        detect_s=max(0.0, at - job.progress_at),
        action=reason,
        before=job.layout,
    )


def resumed(
    incidents: Sequence[Incident], step: int, layout: ParallelLayout | None, tier: Tier | None
) -> tuple[Incident, ...]:
    """An attempt under `layout` continues after `step`: also how every incident goes on that is not over."""
    return tuple(
        dataclasses.replace(incident, after=layout, tier=tier) if incident.recover_s is None else incident
        for incident in settled(incidents, step)
    )


def told(incident: Incident) -> dict[str, Any]:
    """As a record has it: layouts in words."""
    layouts = {"before": _words(incident.before), "after": _words(incident.after)}
    return {**dataclasses.asdict(dataclasses.replace(incident, before=None, after=None)), **layouts}


def _words(layout: ParallelLayout | None) -> str | None:
    return None if layout is None else str(layout)


def settled(incidents: Sequence[Incident], resumed_step: int) -> tuple[Incident, ...]:
    """An attempt continues after `resumed_step`: what it redoes is charged to the first unsettled incident.

    Attempts of later ones never resumed, so they completed nothing that could be lost.
    """
    done: list[Incident] = []
    charged = False
    for incident in incidents:
        if incident.steps_redone is None:
            redone = 0 if charged else max(0, incident.step - resumed_step)
            incident, charged = dataclasses.replace(incident, steps_redone=redone), True
        done.append(incident)
    return tuple(done)


def caught_up(incidents: Sequence[Incident], attempt: int, step: int, later_s: float) -> tuple[Incident, ...]:
    """The broken attempt had completed more than was known when it broke: its last progress was so much later."""
    return tuple(
        dataclasses.replace(incident, step=max(incident.step, step), detect_s=max(0.0, incident.detect_s - later_s))
        if incident.attempt == attempt and incident.steps_redone is None
        else incident
        for incident in incidents
    )


def closed(incidents: Sequence[Incident], attempt: int, at: float) -> tuple[Incident, ...]:
    """`attempt` went further than any before it at `at`: all incidents of earlier attempts are over."""
    return tuple(
        dataclasses.replace(incident, recover_s=max(0.0, at - incident.faulted_at))
        if incident.attempt < attempt and incident.recover_s is None
        else incident
        for incident in incidents
    )
