"""The tables: columns and keys. How they come to be is in `migrations`; a test holds the two together."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from service.store import database

metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

BigKey = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # only INTEGER keys number themselves there


class Prose(sa.TypeDecorator[str]):
    """A sentence that may quote what a rank or a user wrote."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return None if value is None else database.storable(value)


def _job_key(primary_key: bool = False) -> sa.Column[str]:
    return sa.Column("job", sa.Text, sa.ForeignKey("jobs.uid"), primary_key=primary_key, nullable=False)


counters = sa.Table(
    "counters",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.BigInteger, nullable=False),
)

lease = sa.Table(
    "lease",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),  # one row: 1
    sa.Column("holder", sa.Text, nullable=False),  # empty: free
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),  # by the database's clock
)

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("uid", sa.Text, primary_key=True),
    sa.Column("seq", sa.BigInteger, nullable=False, unique=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("phase", sa.Text, nullable=False),
    sa.Column("reason", Prose, nullable=False),
    sa.Column("spec", sa.JSON, nullable=False),
    sa.Column("status", sa.JSON, nullable=False),
    sa.Column("core", sa.JSON(none_as_null=True), nullable=True),  # null: no controller has handled it yet
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("updated_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double, nullable=True),
    sa.Column("cancel_requested", sa.Boolean, nullable=False),
    sa.Column("project", sa.Text, nullable=False, server_default="default"),
    sa.Column("desired", sa.Text, nullable=False, server_default="running"),
    sa.Column("generation", sa.Integer, nullable=False, server_default="1"),  # of the spec
    sa.Index(None, "phase", "seq"),
    sa.Index(None, "name", "seq"),
    sa.Index(None, "project", "seq"),
    sa.Index(None, "project", "phase", "seq"),
    sa.Index(None, "ended_at"),
)

queues = sa.Table(
    "queues",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
)

projects = sa.Table(
    "projects",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("slots", sa.BigInteger, nullable=True),  # that its jobs may hold together; null: no bound
    sa.Column("created_at", sa.Double, nullable=False),
)

tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("digest", sa.Text, nullable=False),  # of its secret, which nobody keeps
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("project", sa.Text, sa.ForeignKey("projects.name"), nullable=True),  # null: all of them
    sa.Column("scope", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=True),
    sa.Column("revoked_at", sa.Double, nullable=True),
)

hooks = sa.Table(
    "hooks",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("secret", sa.Text, nullable=False),  # env:NAME or file:PATH
    sa.Column("project", sa.Text, sa.ForeignKey("projects.name"), nullable=True),  # null: of all
    sa.Column("types", sa.JSON, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("after", sa.BigInteger, nullable=False),  # the last event that it was told of
    sa.Column("failures", sa.Integer, nullable=False),  # in a row
    sa.Column("failing_since", sa.Double, nullable=True),
    sa.Column("error", Prose, nullable=False),
)

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", BigKey, primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("who", sa.Text, nullable=False),
    sa.Column("project", sa.Text, nullable=True),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("target", sa.Text, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Index(None, "project", "id"),
)

job_labels = sa.Table(
    "job_labels",
    metadata,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, primary_key=True),
    sa.Column("seq", sa.BigInteger, sa.ForeignKey("jobs.seq"), primary_key=True, autoincrement=False),  # of the job
    sa.Index(None, "seq", "key"),
)

submissions = sa.Table(
    "submissions",
    metadata,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("digest", sa.Text, nullable=False),
    _job_key(),
    sa.Column("at", sa.Double, nullable=False, index=True),
)

intents = sa.Table(
    "intents",
    metadata,
    sa.Column("id", BigKey, primary_key=True),
    _job_key(),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("done", sa.Boolean, nullable=False),
    sa.Column("data", sa.JSON(none_as_null=True), nullable=True),  # null: the kind says all
    sa.Index(None, "done", "id"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", BigKey, primary_key=True, autoincrement=False),
    _job_key(),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("reason", Prose, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Index(None, "job", "id"),
)

metrics = sa.Table(
    "metrics",
    metadata,
    _job_key(primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
)

rank_times = sa.Table(
    "rank_times",
    metadata,
    _job_key(primary_key=True),
    sa.Column("at", sa.Double, primary_key=True),  # the end of a window
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),  # the last of the window
    sa.Column("parts", sa.JSON, nullable=False),  # name -> seconds by rank
)

log_chunks = sa.Table(
    "log_chunks",
    metadata,
    sa.Column("id", BigKey, primary_key=True, autoincrement=False),
    _job_key(),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("node", sa.Text, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("lines", sa.Integer, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.UniqueConstraint("job", "path"),
    sa.Index(None, "job", "attempt", "id"),
    sa.Index(None, "job", "id"),
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    _job_key(primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("manifest", sa.Text, nullable=False),
    sa.Column("published_at", sa.Double, nullable=False),
    sa.Column("rejected", Prose, nullable=True),
    sa.Column("nbytes", sa.BigInteger, nullable=True),  # null: not told
    sa.Column("verified_at", sa.Double, nullable=True),
)

nodes = sa.Table(
    "nodes",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("slots", sa.Integer, nullable=False),
    sa.Column("rack", sa.Text, nullable=False),
    sa.Column("zone", sa.Text, nullable=False),
    sa.Column("device", sa.Text, nullable=False),
    sa.Column("address", sa.Text, nullable=False),
    sa.Column("seen_at", sa.Double, nullable=False),
    sa.Column("nvlink", sa.Text, nullable=False, server_default=""),
    sa.Column("accelerator", sa.Text, nullable=False, server_default=""),
    sa.Column("draining", sa.Double, nullable=True),  # when it goes, where notice was given
)

node_health = sa.Table(
    "node_health",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),  # of the node: its id ends with its raylet
    sa.Column("data", sa.JSON, nullable=False),
)

forgiven = sa.Table(
    "forgiven",
    metadata,
    sa.Column("node", sa.Text, primary_key=True),  # name
    sa.Column("at", sa.Double, nullable=False),
)
