"""A job as HTML: what it is, a bar of its steps, its figures, its loss. Knows no API and no notebook."""

from __future__ import annotations

import html

from api.curve import Curve
from service.contracts.job import Phase
from service.contracts.status import JobView

COLOURS = {Phase.SUCCEEDED: "#2ca02c", Phase.FAILED: "#d62728", Phase.CANCELLED: "#bcbd22"}
BUSY = "#1f77b4"


def of(job: JobView, curve: Curve | None = None, note: str = "") -> str:
    """With its loss where a `curve` is given, and a line of text below."""
    parts = [_head(job), _bar(job), f"<div>{_figures(job)}</div>"]
    if job.reason:
        parts.append(f"<div>{html.escape(job.reason)}</div>")
    if curve is not None:
        parts.append(curve.svg(job.status.progress.steps))
    if note:
        parts.append(f"<div><em>{html.escape(note)}</em></div>")
    return f'<div style="font-family: sans-serif; max-width: 36em">{"".join(parts)}</div>'


def _head(job: JobView) -> str:
    colour = COLOURS.get(job.phase, BUSY)
    return f'<div><b>{html.escape(job.uid)}</b> <span style="color: {colour}">{job.phase}</span></div>'


def _bar(job: JobView) -> str:
    progress = job.status.progress
    share = min(1.0, progress.step / max(progress.steps, 1))
    return (
        f'<progress value="{share:.4f}" max="1" style="width: 70%"></progress> {progress.step:,} of {progress.steps:,}'
    )


def _figures(job: JobView) -> str:
    progress, status = job.status.progress, job.status
    found = [
        ("loss", progress.loss, ".4f"),
        ("evaluation", progress.eval_loss, ".4f"),
        ("tokens/s", progress.tokens_per_s, ",.0f"),
        ("goodput", job.goodput, ".1%"),
        ("incidents", len(status.incidents) or None, "d"),
    ]
    told = [f"{name} {value:{form}}" for name, value, form in found if value is not None]
    if status.layout is not None:
        told.append(html.escape(str(status.layout)))
    if progress.eta_s is not None and not job.phase.terminal:
        told.append(f"{progress.eta_s:,.0f} s to go")
    return " · ".join(told)
