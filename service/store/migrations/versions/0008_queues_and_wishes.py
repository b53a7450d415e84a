"""Queues with priorities; what a job is to be, and the generation of its spec."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "queues",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_queues"),
    )
    op.execute("INSERT INTO queues (name, priority, created_at) VALUES ('default', 0, 0)")
    op.add_column("jobs", sa.Column("desired", sa.Text, nullable=False, server_default="running"))
    op.add_column("jobs", sa.Column("generation", sa.Integer, nullable=False, server_default="1"))


def downgrade() -> None:
    op.drop_column("jobs", "generation")
    op.drop_column("jobs", "desired")
    op.drop_table("queues")
