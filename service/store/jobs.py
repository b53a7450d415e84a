"""The Store: everything that the API and the controller ask of the database, in their words.

Every method is one transaction and safe from any thread; several processes may use the same store. A database
that can't be reached raises StoreUnavailable. Lists are cut by keyset: pass the last key that was seen. Knows
nothing of what a job's spec, status or core state mean.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from service.contracts.errors import Changed, Conflict, NotFound
from service.contracts.job import Cause, Phase
from service.store import access, counters, database, found, lease, models, records, schema, usage
from service.store import changes as writer
from service.store.access import Access
from service.store.hooks import Hooks

KEY_KEPT_S = 86_400.0
KEYS_CLEARED = 100  # jobs between two looks for keys that have expired
UNSEEN = "not yet seen by the controller"

TOLD = (models.events, models.metrics, models.rank_times, models.log_chunks)  # what retention forgets
OF_A_JOB = (*TOLD, models.checkpoints, models.intents, models.submissions)

CAUSES = (*(cause.value for cause in Cause), "planned")  # of lost time

_ENDED = tuple(phase.value for phase in Phase if phase.terminal)
_JOB = [column for column in models.jobs.c if column.name != "core"]

# Asked with every request: built once.
_ONE = sa.select(*_JOB).where(models.jobs.c.uid == sa.bindparam("given"))
_ADD_JOB = sa.insert(models.jobs)
_KEY = sa.select(models.submissions).where(
    models.submissions.c.key == sa.bindparam("given"), models.submissions.c.at > sa.bindparam("since")
)
_ADD_KEY = sa.insert(models.submissions)
_DROP_KEY = sa.delete(models.submissions).where(models.submissions.c.key == sa.bindparam("given"))
_QUEUES = sa.select(models.queues.c.name).order_by(models.queues.c.name)
_NODES = sa.select(models.nodes).order_by(models.nodes.c.name, models.nodes.c.id)


class Store:
    def __init__(self, opened: database.Database) -> None:
        self._database = opened
        self.access, self.hooks = Access(opened), Hooks(opened)

    @classmethod
    def open(cls, url: str, migrate: bool = True) -> Store:
        """A store whose tables are of this version: made so with `migrate`, else checked."""
        opened = database.Database(url)
        try:
            schema.prepare(opened, migrate)
        except BaseException:
            opened.close()
            raise
        return cls(opened)

    def close(self) -> None:
        self._database.close()

    # What the API asks

    def submit(
        self,
        spec: records.Document,
        name: str,
        *,
        uid: str,
        at: float,
        status: records.Document,
        key: str | None = None,
        digest: str = "",
        origin: str = "",
        project: str = "default",
    ) -> tuple[records.JobRow, bool]:
        """A new job, True; or the job that the same `key` and `digest` made within a day, False.

        `origin`: where it comes from, for its first event. Conflict when the key came with another digest.
        """
        with self._database.write() as connection:
            (seq,) = counters.draw(connection, "jobs")  # from here on no other submission is under way
            if key is not None and (known := _submitted(connection, key, digest, at)):
                connection.rollback()
                return known, False
            row = records.JobRow(
                uid, seq, name, Phase.QUEUED.value, UNSEEN, dict(spec), dict(status), at, at, None, False, project
            )
            fields = {name: getattr(row, name) for name in records.JobRow.__slots__}
            connection.execute(_ADD_JOB, {**fields, "core": None})
            if labels := spec.get("labels"):
                rows = [{"key": label, "value": value, "seq": seq} for label, value in labels.items()]
                connection.execute(sa.insert(models.job_labels), rows)
            if key is not None:
                keys = models.submissions
                if seq % KEYS_CLEARED == 0:
                    connection.execute(sa.delete(keys).where(keys.c.at <= at - KEY_KEPT_S))
                connection.execute(_DROP_KEY, {"given": key})  # one that has expired
                connection.execute(_ADD_KEY, {"key": key, "digest": digest, "job": uid, "at": at})
            writer.add_events(connection, [(uid, at, "JobSubmitted", f"job {name} was submitted{origin}", {})])
            return row, True

    def admission(self, project: str) -> tuple[records.ProjectRow, list[str], list[records.NodeRow]]:
        """What a new job is checked against: its project, the names of the queues, the fleet. NotFound: no project."""
        with self._database.ask() as connection:
            found = access.project(connection, project)
            queues = list(connection.execute(_QUEUES).scalars())
            return found, queues, [records.NodeRow(**row) for row in connection.execute(_NODES).mappings()]

    def submitted(self, key: str, digest: str, at: float) -> records.JobRow | None:
        """The job that this `key` and `digest` made within a day, if any; Conflict as for `submit`."""
        with self._database.ask() as connection:
            return _submitted(connection, key, digest, at)

    def cancel(self, uid: str, at: float, graceful: bool = False) -> None:
        """Leave the intent for the controller. Asking the same again, or for a job that has ended, changes nothing."""
        job, table, data = models.jobs, models.intents, {"graceful": graceful}
        with self._database.write() as connection:
            open_ = (job.c.uid == uid, job.c.phase.not_in(_ENDED))
            asked = sa.update(job).where(*open_).values(cancel_requested=True, updated_at=database.now())
            if not connection.execute(asked).rowcount:
                _job(connection, uid)
                return
            known = connection.execute(sa.select(table.c.data).where(table.c.job == uid, table.c.kind == "cancel"))
            if not any(graceful or one == data for one in known.scalars()):
                connection.execute(sa.insert(table).values(job=uid, kind="cancel", at=at, done=False, data=data))

    def desire(self, uid: str, desired: str, at: float) -> None:
        """What the job is to be, `running` or `suspended`, and the intent. Asking for what it is changes nothing."""
        job, kind = models.jobs, {"running": "resume", "suspended": "suspend"}[desired]
        with self._database.write() as connection:
            asked = sa.update(job).where(job.c.uid == uid, job.c.desired != desired, job.c.phase.not_in(_ENDED))
            if connection.execute(asked.values(desired=desired, updated_at=database.now())).rowcount:
                connection.execute(sa.insert(models.intents).values(job=uid, kind=kind, at=at, done=False))
            else:
                _job(connection, uid)

    def change(self, uid: str, generation: int, spec: records.Document, at: float) -> records.JobRow:
        """The job with another spec, of the generation after `generation`. Changed: it has another one by now. A job
        that has ended stays as it is."""
        job = models.jobs
        with self._database.write() as connection:
            asked = sa.update(job).where(job.c.uid == uid, job.c.generation == generation, job.c.phase.not_in(_ENDED))
            values = {"spec": spec, "generation": generation + 1, "updated_at": database.now()}
            if not connection.execute(asked.values(**values)).rowcount:
                known = _job(connection, uid)
                if known.generation != generation:
                    raise Changed(f"the spec of job {uid} is of generation {known.generation}, not {generation}")
                return known
            data = {"spec": spec, "generation": generation + 1}
            connection.execute(sa.insert(models.intents).values(job=uid, kind="change", at=at, done=False, data=data))
            _label(connection, uid, spec)
            return _job(connection, uid)

    def request(self, uid: str, kind: records.IntentKind, data: records.Document, at: float) -> None:
        """Leave an intent for the controller. Asking the same again before it is done changes nothing."""
        table = models.intents
        with self._database.write() as connection:
            locked = sa.update(models.jobs).where(models.jobs.c.uid == uid).values(updated_at=database.now())
            if not connection.execute(locked).rowcount:
                raise NotFound(f"no job {uid}")
            waiting = sa.select(table.c.data).where(table.c.done.is_(False), table.c.job == uid, table.c.kind == kind)
            if dict(data) not in list(connection.execute(waiting).scalars()):
                connection.execute(sa.insert(table).values(job=uid, kind=kind, at=at, done=False, data=dict(data)))

    def forgive(self, node: str, at: float) -> None:
        """Leave the wish for the controller. NotFound: there is no such node, and nothing is held against one."""
        with self._database.write() as connection:
            known = (models.nodes, models.node_health)
            if not any(connection.scalar(sa.select(one.c.name).where(one.c.name == node)) for one in known):
                raise NotFound(f"no node {node}")
            insert = database.insert(connection, models.forgiven).on_conflict_do_nothing(index_elements=["node"])
            connection.execute(insert, {"node": node, "at": at})

    def remove(self, uid: str) -> None:
        """Forget a job that has ended. Conflict while it has not, while something is asked of it, or while another that
        goes on begins at one of its checkpoints."""
        job, intent = models.jobs.c, models.intents.c
        origin = job.spec["init_from"]["job"].as_string()
        with self._database.write() as connection:
            row = _job(connection, uid)
            if row.phase not in _ENDED:
                raise Conflict(f"job {uid} has not ended: its phase is {row.phase}", hint="cancel it first")
            if connection.scalar(sa.select(intent.id).where(intent.job == uid, intent.done.is_(False)).limit(1)):
                raise Conflict(f"something is still asked of job {uid}", hint="try again in a moment")
            child = connection.scalar(sa.select(job.uid).where(job.phase.not_in(_ENDED), origin == uid).limit(1))
            if child is not None:
                raise Conflict(f"job {child} begins at a checkpoint of job {uid}", hint=f"wait until {child} has ended")
            connection.execute(sa.delete(models.job_labels).where(models.job_labels.c.seq == row.seq))
            for table in OF_A_JOB:
                connection.execute(sa.delete(table).where(table.c.job == uid))
            connection.execute(sa.delete(models.jobs).where(job.uid == uid))

    def expired(self, before: float, limit: int = 100) -> list[records.JobRow]:
        """Jobs that ended before that time and of which there still are events, metrics or logs; the oldest first."""
        job = models.jobs.c
        left = sa.or_(*(sa.exists().where(table.c.job == job.uid) for table in TOLD))
        query = sa.select(*_JOB).where(job.ended_at < before, left).order_by(job.ended_at).limit(limit)
        return [records.JobRow(**row) for row in self._rows(query)]

    def expire(self, epoch: int, uid: str) -> None:
        """Its events, metrics and logs go; what became of it stays. Fenced when the lease is no longer held."""
        with self._database.write() as connection:
            lease.check(connection, epoch)
            for table in TOLD:
                connection.execute(sa.delete(table).where(table.c.job == uid))

    def job(self, uid: str) -> records.JobRow:
        """NotFound when there is none."""
        with self._database.ask() as connection:
            return _job(connection, uid)

    def core(self, uid: str) -> dict[str, Any] | None:
        """The core's own state of the job; None: no controller has handled it yet. NotFound when there is no job."""
        rows = self._rows(sa.select(models.jobs.c.core).where(models.jobs.c.uid == uid))
        if not rows:
            raise NotFound(f"no job {uid}")
        core: dict[str, Any] | None = rows[0]["core"]
        return core

    def jobs(
        self,
        which: records.Which = records.Which(),  # frozen
        *,
        after: int | None = None,
        limit: int = 50,
        oldest: bool = False,
    ) -> list[records.JobRow]:
        """Newest first, or `oldest`; `after` is the `seq` of the last job seen."""
        seq = models.jobs.c.seq
        query = sa.select(*_JOB).where(*found.conditions(which)).order_by(seq if oldest else seq.desc()).limit(limit)
        if after is not None:
            query = query.where(seq > after if oldest else seq < after)
        return [records.JobRow(**row) for row in self._rows(query)]

    def events(
        self, job: str | None, after: int, limit: int = 500, types: Collection[str] = (), since: float = 0.0
    ) -> list[records.EventRow]:
        """Oldest first, of one job or of all; `after` is the id of the last event seen. Only of these types, and not
        from before `since`, where that is said."""
        table = models.events
        query = sa.select(table).where(table.c.id > after).order_by(table.c.id).limit(limit)
        if job is not None:
            query = query.where(table.c.job == job)
        if types:
            query = query.where(table.c.type.in_(types))
        if since:
            query = query.where(table.c.at >= since)
        return [records.EventRow(**row) for row in self._rows(query)]

    def newest(self) -> tuple[int, int]:
        """Ids of the newest event and of the newest chunk of a log, of all jobs."""
        with self._database.read() as connection:
            found = [connection.scalar(sa.select(sa.func.max(one.c.id))) for one in (models.events, models.log_chunks)]
            return found[0] or 0, found[1] or 0

    def chunks_since(self, after: int) -> dict[str, int]:
        """The jobs whose logs have grown since the chunk `after`, with the newest of each."""
        table = models.log_chunks
        query = sa.select(table.c.job, sa.func.max(table.c.id).label("id")).where(table.c.id > after)
        return {row["job"]: row["id"] for row in self._rows(query.group_by(table.c.job))}

    def last_event(self, job: str) -> int:
        """The id of the job's newest event."""
        with self._database.read() as connection:
            newest = connection.execute(sa.select(sa.func.max(models.events.c.id)).where(models.events.c.job == job))
            return newest.scalar_one() or 0

    def metrics(self, job: str, after_step: int, limit: int = 5000) -> list[records.MetricRow]:
        """In the order of steps; `after_step` is the last step seen."""
        table = models.metrics
        query = sa.select(table.c.job, table.c.step, table.c.attempt, table.c.at, table.c.data.label("values")).where(
            table.c.job == job, table.c.step > after_step
        )
        return [records.MetricRow(**row) for row in self._rows(query.order_by(table.c.step).limit(limit))]

    def sampled(self, job: str, points: int, after_step: int = 0) -> list[records.MetricRow]:
        """At most about `points` rows in the order of steps, the last of each of as many equal spans; beside its own
        figures each has the least and the greatest loss of its span, and how many steps that has."""
        table = models.metrics
        mine = (table.c.job == job, table.c.step > after_step)
        loss = table.c.data["loss"].as_float()
        with self._database.read() as connection:
            first, last = connection.execute(
                sa.select(sa.func.min(table.c.step), sa.func.max(table.c.step)).where(*mine)
            ).one()
            if first is None:
                return []
            width = max(1, -(-(last - first + 1) // points))
            span = (table.c.step - first) // width
            spans = (
                sa.select(
                    sa.func.max(table.c.step).label("step"),
                    sa.func.min(loss).label("loss_min"),
                    sa.func.max(loss).label("loss_max"),
                    sa.func.count().label("steps"),
                )
                .where(*mine)
                .group_by(span)
                .subquery()
            )
            query = (
                sa.select(table, spans.c.loss_min, spans.c.loss_max, spans.c.steps)
                .join(spans, sa.and_(table.c.job == job, table.c.step == spans.c.step))
                .order_by(table.c.step)
            )
            rows = connection.execute(query).mappings()
            return [
                records.MetricRow(
                    job, row["step"], row["attempt"], row["at"],
                    {**row["data"], **{name: row[name] for name in ("loss_min", "loss_max", "steps")}},
                )
                for row in rows
            ]  # fmt: skip

    def times(self, job: str, attempt: int) -> records.TimesRow | None:
        """The newest of an attempt."""
        table = models.rank_times
        query = sa.select(table).where(table.c.job == job, table.c.attempt == attempt).order_by(table.c.at.desc())
        return next((records.TimesRow(**row) for row in self._rows(query.limit(1))), None)

    def log_chunks(
        self, job: str, after: int, attempt: int | None = None, limit: int = 100, since: float = 0.0
    ) -> list[records.LogChunkRow]:
        """Oldest first; `after` is the id of the last chunk seen. None that was shipped before `since`."""
        table = models.log_chunks
        query = sa.select(table).where(table.c.job == job, table.c.id > after, table.c.at >= since)
        if attempt is not None:
            query = query.where(table.c.attempt == attempt)
        return [records.LogChunkRow(**row) for row in self._rows(query.order_by(table.c.id).limit(limit))]

    def checkpoints(self, job: str) -> list[records.CheckpointRow]:
        """Newest first, the rejected ones too."""
        table = models.checkpoints
        newest = table.c.step.desc(), table.c.attempt.desc()
        query = sa.select(table).where(table.c.job == job).order_by(*newest)
        return [records.CheckpointRow(**row) for row in self._rows(query)]

    def nodes(self) -> list[records.NodeRow]:
        """The fleet as the controller last saw it, by name."""
        query = sa.select(models.nodes).order_by(models.nodes.c.name, models.nodes.c.id)
        return [records.NodeRow(**row) for row in self._rows(query)]

    def health(self) -> dict[str, dict[str, Any]]:
        """What is held against nodes, by name, as the core wrote it."""
        table = models.node_health
        return {row["name"]: row["data"] for row in self._rows(sa.select(table).order_by(table.c.name))}

    def now(self) -> float:
        """Unix seconds by the database's clock."""
        with self._database.ask() as connection:
            return float(connection.execute(sa.select(database.now())).scalar_one())

    def usage(self, project: str | None, since: float, until: float) -> list[records.UsageRow]:
        """By project and queue, of jobs that were submitted in [since, until)."""
        with self._database.ask() as connection:
            return usage.usage(connection, project, since, until, CAUSES)

    def ping(self) -> None:
        """StoreUnavailable when the store can't be read."""
        self._rows(sa.select(models.lease.c.epoch))

    # What the controller asks

    def acquire(self, holder: str, ttl_s: float) -> int | None:
        """The lease's epoch, or None while another holds it. `holder` names one process."""
        with self._database.write() as connection:
            return lease.acquire(connection, holder, ttl_s)

    def renew(self, holder: str, epoch: int, ttl_s: float) -> bool:
        """False: another has taken the lease, or it was released."""
        with self._database.write() as connection:
            return lease.renew(connection, holder, epoch, ttl_s)

    def release(self, holder: str, epoch: int) -> None:
        """Free the lease, if it is still ours."""
        with self._database.write() as connection:
            lease.release(connection, holder, epoch)

    def holder(self) -> tuple[str, int]:
        """(who holds the lease, expired or not; empty: nobody, its epoch)."""
        with self._database.read() as connection:
            return lease.holder(connection)

    def commit(self, epoch: int, changes: records.Changes) -> None:
        """All of `changes` or nothing. Fenced when the lease is no longer held under `epoch`."""
        with self._database.write() as connection:
            lease.check(connection, epoch)
            writer.write(connection, changes)

    def unseen_jobs(self, after_seq: int) -> list[tuple[records.JobRow, dict[str, Any] | None]]:
        """Jobs submitted since that no controller has handled, oldest first, with None for the core's state."""
        job = models.jobs.c
        return self._with_core(sa.and_(job.seq > after_seq, job.core.is_(sa.null()), job.phase.not_in(_ENDED)))

    def unfinished(self) -> list[tuple[records.JobRow, dict[str, Any] | None]]:
        """Jobs that have not ended, oldest first, with the core's state (None: never handled)."""
        return self._with_core(models.jobs.c.phase.not_in(_ENDED))

    def intents(self, limit: int = 100, taken: Collection[int] = ()) -> list[records.Intent]:
        """Not yet handled, oldest first, without those that are `taken` up already."""
        table = models.intents
        query = (
            sa.select(table.c.id, table.c.job, table.c.kind, table.c.at, table.c.data)
            .where(table.c.done.is_(False), table.c.id.not_in(taken))
            .order_by(table.c.id)
            .limit(limit)
        )
        return [records.Intent(**{**row, "data": row["data"] or {}}) for row in self._rows(query)]

    def forgiven(self) -> list[str]:
        """Names of nodes that the controller has not forgiven yet."""
        return [row["node"] for row in self._rows(sa.select(models.forgiven.c.node).order_by(models.forgiven.c.at))]

    def _with_core(self, which: sa.ColumnElement[bool]) -> list[tuple[records.JobRow, dict[str, Any] | None]]:
        rows = self._rows(sa.select(models.jobs).where(which).order_by(models.jobs.c.seq))
        cores = [row.pop("core") for row in rows]
        return [(records.JobRow(**row), core) for row, core in zip(rows, cores, strict=True)]

    def _rows(self, query: sa.Select[Any]) -> list[dict[str, Any]]:
        with self._database.ask() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]


def _job(connection: sa.Connection, uid: str) -> records.JobRow:
    row = connection.execute(_ONE, {"given": uid}).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no job {uid}")
    return records.JobRow(**row)


def _label(connection: sa.Connection, uid: str, spec: records.Document) -> None:
    """The job is found by what its spec says, and by nothing else."""
    table, seq = models.job_labels, sa.select(models.jobs.c.seq).where(models.jobs.c.uid == uid).scalar_subquery()
    connection.execute(sa.delete(table).where(table.c.seq == seq))
    if labels := spec.get("labels"):
        number = connection.execute(sa.select(seq)).scalar_one()
        rows = [{"key": name, "value": value, "seq": number} for name, value in labels.items()]
        connection.execute(sa.insert(table), rows)


def _submitted(connection: sa.Connection, key: str, digest: str, at: float) -> records.JobRow | None:
    known = connection.execute(_KEY, {"given": key, "since": at - KEY_KEPT_S}).one_or_none()
    if known is None:
        return None
    if known.digest != digest:
        raise Conflict(
            f"this idempotency key was used for job {known.job}, which was another request",
            hint="send a new key with a new request",
        )
    return _job(connection, known.job)
