"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = "nodes checkpoints log_chunks metrics events intents submissions jobs lease counters"  # as drops go


def upgrade() -> None:
    big_key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    counters = op.create_table(
        "counters",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_counters"),
    )
    op.bulk_insert(counters, [{"name": name, "value": 0} for name in ("jobs", "events", "log_chunks")])
    lease = op.create_table(
        "lease",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_lease"),
    )
    op.bulk_insert(lease, [{"id": 1, "holder": "", "epoch": 0, "expires_at": 0.0}])
    op.create_table(
        "jobs",
        sa.Column("uid", sa.Text, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("phase", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("status", sa.JSON, nullable=False),
        sa.Column("core", sa.JSON, nullable=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double, nullable=True),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("uid", name="pk_jobs"),
        sa.UniqueConstraint("seq", name="uq_jobs_seq"),
    )
    op.create_index("ix_jobs_phase_seq", "jobs", ["phase", "seq"])
    op.create_table(
        "submissions",
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_submissions"),
        sa.ForeignKeyConstraint(["job"], ["jobs.uid"], name="fk_submissions_job"),
    )
    op.create_index("ix_submissions_at", "submissions", ["at"])
    op.create_table(
        "intents",
        sa.Column("id", big_key, nullable=False),
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("done", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_intents"),
        sa.ForeignKeyConstraint(["job"], ["jobs.uid"], name="fk_intents_job"),
    )
    op.create_index("ix_intents_done_id", "intents", ["done", "id"])
    op.create_table(
        "events",
        sa.Column("id", big_key, autoincrement=False, nullable=False),
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sa.ForeignKeyConstraint(["job"], ["jobs.uid"], name="fk_events_job"),
    )
    op.create_index("ix_events_job_id", "events", ["job", "id"])
    op.create_table(
        "metrics",
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("step", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("job", "step", name="pk_metrics"),
        sa.ForeignKeyConstraint(["job"], ["jobs.uid"], name="fk_metrics_job"),
    )
    op.create_table(
        "log_chunks",
        sa.Column("id", big_key, autoincrement=False, nullable=False),
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("lines", sa.Integer, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_log_chunks"),
        sa.ForeignKeyConstraint(["job"], ["jobs.uid"], name="fk_log_chunks_job"),
        sa.UniqueConstraint("job", "path", name="uq_log_chunks_job_path"),
    )
    op.create_index("ix_log_chunks_job_attempt_id", "log_chunks", ["job", "attempt", "id"])
    op.create_index("ix_log_chunks_job_id", "log_chunks", ["job", "id"])
    op.create_table(
        "checkpoints",
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("step", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("manifest", sa.Text, nullable=False),
        sa.Column("published_at", sa.Double, nullable=False),
        sa.Column("rejected", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("job", "step", "attempt", name="pk_checkpoints"),
        sa.ForeignKeyConstraint(["job"], ["jobs.uid"], name="fk_checkpoints_job"),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("slots", sa.Integer, nullable=False),
        sa.Column("rack", sa.Text, nullable=False),
        sa.Column("zone", sa.Text, nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("seen_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_nodes"),
    )


def downgrade() -> None:
    for table in TABLES.split():
        op.drop_table(table)
