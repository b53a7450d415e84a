"""What jobs have used, added up by the database: slot-hours, tokens and useful time, by project and queue."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from service.store import database, models, records


def usage(
    connection: sa.Connection, project: str | None, since: float, until: float, causes: Sequence[str]
) -> list[records.UsageRow]:
    """Of jobs that were submitted in [since, until), whatever they have used until now, and lost by these causes."""
    job = models.jobs.c
    status, queue = job.status, job.spec["queue"].as_string()
    lost = status["lost_slot_s"]
    held_s = sa.func.coalesce(status["slots"].as_float(), 0.0) * (
        database.now() - sa.func.coalesce(status["slots_at"].as_float(), 0.0)
    )
    slot_s = sa.func.coalesce(status["slot_s"].as_float(), 0.0) + held_s
    ended = sa.func.coalesce(job.ended_at, database.now())
    query = (
        sa.select(
            job.project,
            queue.label("queue"),
            sa.func.count().label("jobs"),
            sa.func.sum(slot_s).label("slot_s"),
            sa.func.sum(status["progress"]["tokens"].as_float()).label("tokens"),
            sa.func.sum(status["productive_s"].as_float()).label("productive_s"),
            sa.func.sum(ended - job.created_at).label("elapsed_s"),
            *(sa.func.sum(sa.func.coalesce(lost[name].as_float(), 0.0)).label(f"lost_{name}") for name in causes),
        )
        .where(job.created_at >= since, job.created_at < until)
        .group_by(job.project, queue)
        .order_by(job.project, queue)
    )
    if project is not None:
        query = query.where(job.project == project)
    found = []
    for row in connection.execute(query).mappings():
        own = {name: value for name, value in row.items() if not name.startswith("lost_")}
        found.append(records.UsageRow(**own, lost_slot_s={name: row[f"lost_{name}"] for name in causes}))
    return found
