"""Projects, queues, tokens and the audit log. A token's secret is never here, only its digest."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from service.contracts.errors import Conflict, NotFound
from service.store import database, models, records

_PROJECT = sa.select(models.projects).where(models.projects.c.name == sa.bindparam("given"))


class Access:
    """Each method is one transaction."""

    def __init__(self, opened: database.Database) -> None:
        self._database = opened

    def add_project(self, name: str, slots: int | None, at: float) -> records.ProjectRow:
        """Conflict when there is one of that name."""
        with self._database.write() as connection:
            insert = database.insert(connection, models.projects).on_conflict_do_nothing(index_elements=["name"])
            made = insert.returning(models.projects.c.name)
            if connection.scalar(made, {"name": name, "slots": slots, "created_at": at}) is None:
                raise Conflict(f"there is a project {name} already", field="name")
        return records.ProjectRow(name, slots, at)

    def set_slots(self, name: str, slots: int | None) -> records.ProjectRow:
        """What its jobs may hold together; None: no bound."""
        table = models.projects
        with self._database.write() as connection:
            connection.execute(sa.update(table).where(table.c.name == name).values(slots=slots))
            return project(connection, name)

    def project(self, name: str) -> records.ProjectRow:
        """NotFound when there is none."""
        with self._database.read() as connection:
            return project(connection, name)

    def projects(self) -> list[records.ProjectRow]:
        """By name."""
        with self._database.read() as connection:
            rows = connection.execute(sa.select(models.projects).order_by(models.projects.c.name)).mappings()
            return [records.ProjectRow(**row) for row in rows]

    def add_queue(self, name: str, priority: int, at: float) -> records.QueueRow:
        """Conflict when there is one of that name."""
        with self._database.write() as connection:
            insert = database.insert(connection, models.queues).on_conflict_do_nothing(index_elements=["name"])
            made = insert.returning(models.queues.c.name)
            if connection.scalar(made, {"name": name, "priority": priority, "created_at": at}) is None:
                raise Conflict(f"there is a queue {name} already", field="name")
        return records.QueueRow(name, priority, at)

    def set_priority(self, name: str, priority: int) -> records.QueueRow:
        """Of all its jobs, from now on. NotFound when there is none."""
        table = models.queues
        with self._database.write() as connection:
            connection.execute(sa.update(table).where(table.c.name == name).values(priority=priority))
            row = connection.execute(sa.select(table).where(table.c.name == name)).mappings().one_or_none()
        if row is None:
            raise NotFound(f"there is no queue {name}", field="name")
        return records.QueueRow(**row)

    def queues(self) -> list[records.QueueRow]:
        """What comes first is first."""
        table = models.queues
        with self._database.read() as connection:
            rows = connection.execute(sa.select(table).order_by(table.c.priority.desc(), table.c.name)).mappings()
            return [records.QueueRow(**row) for row in rows]

    def shares(self) -> tuple[dict[str, int], dict[str, int]]:
        """(priority of each queue, slots of each project that has a quota)."""
        queues, projects = models.queues.c, models.projects.c
        quotas = sa.select(projects.name, projects.slots).where(projects.slots.is_not(None))
        with self._database.read() as connection:
            priorities = connection.execute(sa.select(queues.name, queues.priority)).all()
            return {row[0]: row[1] for row in priorities}, {row[0]: row[1] for row in connection.execute(quotas)}

    def add_token(self, row: records.TokenRow, digest: str) -> None:
        """NotFound when there is no such project."""
        fields = {name: getattr(row, name) for name in records.TokenRow.__slots__}
        with self._database.write() as connection:
            if row.project is not None:
                project(connection, row.project)
            connection.execute(sa.insert(models.tokens).values(**fields, digest=digest))

    def token(self, id_: str) -> tuple[records.TokenRow, str] | None:
        """The token and its digest, revoked and expired ones too."""
        with self._database.read() as connection:
            row = connection.execute(sa.select(models.tokens).where(models.tokens.c.id == id_)).mappings().one_or_none()
        if row is None:
            return None
        fields = dict(row)
        digest = str(fields.pop("digest"))
        return records.TokenRow(**fields), digest

    def tokens(self, project: str | None = None) -> list[records.TokenRow]:
        """Oldest first; of one project, or all."""
        table = models.tokens
        query = sa.select(*(column for column in table.c if column.name != "digest"))
        if project is not None:
            query = query.where(table.c.project == project)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(table.c.created_at, table.c.id)).mappings()
            return [records.TokenRow(**row) for row in rows]

    def revoke(self, id_: str, at: float) -> None:
        """It opens nothing from now on. Safe to repeat; NotFound when there is none."""
        table = models.tokens
        with self._database.write() as connection:
            if connection.scalar(sa.select(table.c.id).where(table.c.id == id_)) is None:
                raise NotFound(f"there is no token {id_}", field="id")
            revoked = sa.update(table).where(table.c.id == id_, table.c.revoked_at.is_(None))
            connection.execute(revoked.values(revoked_at=at))

    def note(self, entries: Sequence[records.Audit]) -> None:
        """Somebody changed something, or tried to."""
        names = [name for name in records.Audit.__slots__ if name != "id"]
        with self._database.write() as connection:
            connection.execute(
                sa.insert(models.audit), [{name: getattr(one, name) for name in names} for one in entries]
            )

    def audit(self, project: str | None, after: int = 0, limit: int = 500) -> list[records.Audit]:
        """Oldest first; of one project, or all. `after`: the id of the last one seen."""
        table = models.audit
        query = sa.select(table).where(table.c.id > after)
        if project is not None:
            query = query.where(table.c.project == project)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(table.c.id).limit(limit)).mappings()
            return [records.Audit(**row) for row in rows]


def project(connection: sa.Connection, name: str) -> records.ProjectRow:
    row = connection.execute(_PROJECT, {"given": name}).mappings().one_or_none()
    if row is None:
        raise NotFound(f"there is no project {name}", field="project")
    return records.ProjectRow(**row)
