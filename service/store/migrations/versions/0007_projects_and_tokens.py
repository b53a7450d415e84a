"""Projects, who may do what in them, and what was changed by whom."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("slots", sa.BigInteger, nullable=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_projects"),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("project", sa.Text, nullable=True),
        sa.Column("scope", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=True),
        sa.Column("revoked_at", sa.Double, nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name="fk_tokens_project"),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
    )
    op.create_table(
        "audit",
        sa.Column("id", KEY, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("project", sa.Text, nullable=True),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_project_id", "audit", ["project", "id"])
    op.execute("INSERT INTO projects (name, slots, created_at) VALUES ('default', NULL, 0)")
    op.add_column("jobs", sa.Column("project", sa.Text, nullable=False, server_default="default"))
    op.create_index("ix_jobs_project_seq", "jobs", ["project", "seq"])
    op.create_index("ix_jobs_project_phase_seq", "jobs", ["project", "phase", "seq"])


def downgrade() -> None:
    op.drop_index("ix_jobs_project_phase_seq", "jobs")
    op.drop_index("ix_jobs_project_seq", "jobs")
    op.drop_column("jobs", "project")
    for table in ("audit", "tokens", "projects"):
        op.drop_table(table)
