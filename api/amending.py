"""What of a job that is there may be changed, and to what."""

from __future__ import annotations

from typing import Any

from api import checks, patch
from api.door import Door
from service.contracts import errors, job
from service.contracts.job import JobSpec
from service.store.records import JobRow

OPEN: dict[str, tuple[str, ...]] = {
    "priority": (),
    "queue": (),
    "labels": (),
    "budgets": (),
    "resources": ("elastic",),
    "checkpoint": ("every_steps", "snapshot_every", "keep", "keep_every"),
}
"""Fields that may change; of some only these."""

SCHEMA: dict[str, Any] = {
    "properties": {
        name: {"type": ["object", "null"] if name in ("labels", "budgets") else "object"}
        if name not in ("priority", "queue")
        else {"type": ["string" if name == "queue" else "integer", "null"]}
        for name in OPEN
    },
    "additionalProperties": False,
}


def applied(given: Door, row: JobRow, change: dict[str, Any]) -> JobSpec:
    """The spec with the change. UserError names the field that can't be changed, or what is wrong with it."""
    for name, value in change.items():
        _open(name, value)
    spec = job.parse_job(patch.merged(row.spec, change))
    checks.queue(spec, [known.name for known in given.store.access.queues()])
    return spec


def _open(name: str, value: Any) -> None:
    names = [f"{one}.{inner}".rstrip(".") for one, inners in OPEN.items() for inner in inners or ("",)]
    hint = f"these can be: {', '.join(names)}; for anything else, fork it: phalanx checkpoint fork"
    if name not in OPEN:
        raise errors.UserError(f"{name} of a job that is there can't be changed", hint=hint, field=name)
    closed = [inner for inner in value if inner not in OPEN[name]] if isinstance(value, dict) and OPEN[name] else []
    if closed or (OPEN[name] and not isinstance(value, dict)):
        field = f"{name}.{closed[0]}" if closed else name
        raise errors.UserError(f"{field} of a job that is there can't be changed", hint=hint, field=field)
