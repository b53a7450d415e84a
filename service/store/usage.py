"""What jobs have used, added up by the database: slot-hours, tokens and useful time, by project and queue."""

from __future__ import annotations

import sqlalchemy as sa

from service.store import database, models, records


def usage(connection: sa.Connection, project: str | None, since: float, until: float) -> list[records.UsageRow]:
    """Of jobs that were submitted in [since, until), whatever they have used until now."""
    job = models.jobs.c
    status, queue = job.status, job.spec["queue"].as_string()
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
        )
        .where(job.created_at >= since, job.created_at < until)
        .group_by(job.project, queue)
        .order_by(job.project, queue)
    )
    if project is not None:
        query = query.where(job.project == project)
    return [records.UsageRow(**row) for row in connection.execute(query).mappings()]
