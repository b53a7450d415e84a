"""Writes one turn of the controller. The caller's transaction makes it all or nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from service.contracts.errors import NotFound
from service.store import counters, database, models, records


def write(connection: sa.Connection, changes: records.Changes) -> None:
    """All of `changes`. NotFound for a job that doesn't exist; what is told of one that was removed is dropped."""
    _jobs(connection, changes.jobs)
    changes = _of_known(connection, changes)
    _intents(connection, changes.intents_done)
    _metrics(connection, changes.metrics)
    _times(connection, changes.times)
    _checkpoints(connection, changes.checkpoints)
    _nodes(connection, changes.nodes)
    _health(connection, changes.health)
    _forgiven(connection, changes.forgiven)
    add_events(connection, changes.events)
    _log_chunks(connection, changes.log_chunks)


def _of_known(connection: sa.Connection, changes: records.Changes) -> records.Changes:
    """Without what is told of jobs that were removed: a checkpoint may be verified after the end of its job."""
    told = {event[0] for event in changes.events}
    beside = (changes.metrics, changes.times, changes.log_chunks, changes.checkpoints)
    told |= {one.job for rows in beside for one in rows}
    unsure = told - {update.uid for update in changes.jobs}
    if not unsure:
        return changes
    found = connection.execute(sa.select(models.jobs.c.uid).where(models.jobs.c.uid.in_(sorted(unsure)))).scalars()
    gone = unsure - set(found)
    if not gone:
        return changes
    return dataclasses.replace(
        changes,
        events=[event for event in changes.events if event[0] not in gone],
        metrics=[row for row in changes.metrics if row.job not in gone],
        times=[row for row in changes.times if row.job not in gone],
        log_chunks=[row for row in changes.log_chunks if row.job not in gone],
        checkpoints=[row for row in changes.checkpoints if row.job not in gone],
    )


def add_events(connection: sa.Connection, events: Sequence[records.NewEvent]) -> None:
    if not events:
        return
    ids = counters.draw(connection, "events", len(events))
    rows = [
        {"id": id_, "job": job, "at": at, "type": type_, "reason": reason, "data": data}
        for id_, (job, at, type_, reason, data) in zip(ids, events, strict=True)
    ]
    connection.execute(sa.insert(models.events), rows)


def _jobs(connection: sa.Connection, updates: Sequence[records.JobUpdate]) -> None:
    for update in updates:
        values = {name: getattr(update, name) for name in ("phase", "reason", "status", "core", "ended_at")}
        written = connection.execute(
            sa.update(models.jobs).where(models.jobs.c.uid == update.uid).values(**values, updated_at=database.now())
        )
        if written.rowcount != 1:
            raise NotFound(f"no job {update.uid}")


def _intents(connection: sa.Connection, ids: Sequence[int]) -> None:
    if ids:
        connection.execute(sa.update(models.intents).where(models.intents.c.id.in_(ids)).values(done=True))


def _metrics(connection: sa.Connection, rows: Sequence[records.MetricRow]) -> None:
    newest: dict[tuple[str, int], records.MetricRow] = {}
    _recalled(connection, [row for row in rows if row.recalled])
    for row in (row for row in rows if not row.recalled):
        known = newest.get((row.job, row.step))
        if row.beside and known is not None and known.attempt == row.attempt:
            row = dataclasses.replace(known, values={**known.values, **row.values})
        if known is None or row.attempt >= known.attempt:
            newest[row.job, row.step] = row
    _whole(connection, [row for row in newest.values() if not row.beside])
    for row in newest.values():
        if row.beside:
            _beside(connection, row)


def _recalled(connection: sa.Connection, rows: Sequence[records.MetricRow]) -> None:
    if rows:
        insert = database.insert(connection, models.metrics).on_conflict_do_nothing(index_elements=["job", "step"])
        connection.execute(insert, [_stored(row) for row in rows])


def _beside(connection: sa.Connection, row: records.MetricRow) -> None:
    table = models.metrics
    own = (table.c.job == row.job, table.c.step == row.step, table.c.attempt == row.attempt)
    known = connection.execute(sa.select(table.c.data).where(*own)).scalar_one_or_none()
    if known is not None:
        connection.execute(sa.update(table).where(*own).values(data={**known, **row.values}))


def _whole(connection: sa.Connection, rows: Sequence[records.MetricRow]) -> None:
    if not rows:
        return
    insert = database.insert(connection, models.metrics)
    upsert = insert.on_conflict_do_update(
        index_elements=["job", "step"],
        set_={name: insert.excluded[name] for name in ("attempt", "at", "data")},
        where=models.metrics.c.attempt <= insert.excluded.attempt,
    )
    connection.execute(upsert, [_stored(row) for row in rows])


def _times(connection: sa.Connection, rows: Sequence[records.TimesRow]) -> None:
    if rows:
        insert = database.insert(connection, models.rank_times).on_conflict_do_nothing(index_elements=["job", "at"])
        connection.execute(insert, [dataclasses.asdict(row) for row in rows])


def _stored(row: records.MetricRow) -> dict[str, Any]:
    return {"job": row.job, "step": row.step, "attempt": row.attempt, "at": row.at, "data": row.values}


def _checkpoints(connection: sa.Connection, rows: Sequence[records.CheckpointRow]) -> None:
    insert = database.insert(connection, models.checkpoints)
    upsert = insert.on_conflict_do_update(
        index_elements=["job", "step", "attempt"],
        set_={
            "manifest": insert.excluded.manifest,
            "published_at": sa.case(  # a rejection and a verification come with their own time
                (
                    insert.excluded.rejected.is_not(None) | insert.excluded.verified_at.is_not(None),
                    models.checkpoints.c.published_at,
                ),
                else_=insert.excluded.published_at,
            ),
            # once rejected, never trusted again
            **{
                name: sa.func.coalesce(insert.excluded[name], models.checkpoints.c[name])
                for name in ("rejected", "nbytes", "verified_at")
            },
        },
    )
    for row in rows:
        connection.execute(upsert, dataclasses.asdict(row))


def _log_chunks(connection: sa.Connection, chunks: Sequence[records.LogChunk | records.LogChunkRow]) -> None:
    if not chunks:
        return
    ids = counters.draw(connection, "log_chunks", len(chunks))
    insert = database.insert(connection, models.log_chunks).on_conflict_do_nothing(index_elements=["job", "path"])
    for id_, chunk in zip(ids, chunks, strict=True):
        connection.execute(insert, dataclasses.asdict(chunk) | {"id": id_})


def _nodes(connection: sa.Connection, rows: Sequence[records.NodeRow] | None) -> None:
    if rows is None:
        return
    connection.execute(sa.delete(models.nodes))
    if rows:
        connection.execute(sa.insert(models.nodes), [dataclasses.asdict(row) for row in rows])


def _health(connection: sa.Connection, health: Mapping[str, records.Document] | None) -> None:
    if health is None:
        return
    connection.execute(sa.delete(models.node_health))
    if health:
        rows = [{"name": name, "data": dict(data)} for name, data in health.items()]
        connection.execute(sa.insert(models.node_health), rows)


def _forgiven(connection: sa.Connection, nodes: Sequence[str]) -> None:
    if nodes:
        connection.execute(sa.delete(models.forgiven).where(models.forgiven.c.node.in_(nodes)))
