"""Webhooks: who is told of which events, and how far he was told. A secret is never here, only where it is found."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from service.contracts.errors import NotFound
from service.store import access, database, models, records

_EVENTS = models.events.c


class Hooks:
    """Each method is one transaction."""

    def __init__(self, opened: database.Database) -> None:
        self._database = opened

    def add(self, row: records.HookRow) -> records.HookRow:
        """It is told what comes from now on. NotFound: no such project."""
        with self._database.write() as connection:
            if row.project is not None:
                access.project(connection, row.project)
            newest = connection.scalar(sa.select(sa.func.max(_EVENTS.id))) or 0
            fields = {name: getattr(row, name) for name in records.HookRow.__slots__} | {"after": newest}
            connection.execute(sa.insert(models.hooks), {**fields, "types": list(row.types)})
        return records.HookRow(**{**fields, "types": tuple(row.types)})

    def all(self) -> list[records.HookRow]:
        """Oldest first."""
        with self._database.ask() as connection:
            rows = connection.execute(sa.select(models.hooks).order_by(models.hooks.c.created_at, models.hooks.c.id))
            return [records.HookRow(**{**row, "types": tuple(row["types"])}) for row in rows.mappings()]

    def remove(self, id_: str) -> None:
        """NotFound when there is none."""
        with self._database.write() as connection:
            if not connection.execute(sa.delete(models.hooks).where(models.hooks.c.id == id_)).rowcount:
                raise NotFound(f"there is no webhook {id_}", field="id")

    def due(self, hook: records.HookRow, limit: int) -> list[records.EventRow]:
        """The events that it is still to be told of, oldest first."""
        query = sa.select(models.events).where(_EVENTS.id > hook.after, _EVENTS.type.in_(hook.types))
        if hook.project is not None:
            query = query.join(models.jobs, models.jobs.c.uid == _EVENTS.job)
            query = query.where(models.jobs.c.project == hook.project)
        with self._database.ask() as connection:
            rows = connection.execute(query.order_by(_EVENTS.id).limit(limit)).mappings()
            return [records.EventRow(**row) for row in rows]

    def told(self, id_: str, after: int) -> None:
        """It has heard of events up to this one."""
        self._set(id_, after=after, failures=0, failing_since=None, error="")

    def failed(self, hook: records.HookRow, error: str, at: float) -> None:
        self._set(hook.id, failures=hook.failures + 1, failing_since=hook.failing_since or at, error=error)

    def _set(self, id_: str, **values: Any) -> None:
        with self._database.write() as connection:
            connection.execute(sa.update(models.hooks).where(models.hooks.c.id == id_).values(**values))
