"""Labels of jobs, to find them by; and jobs by name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job_labels",
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["seq"], ["jobs.seq"], name="fk_job_labels_seq"),
        sa.PrimaryKeyConstraint("key", "value", "seq", name="pk_job_labels"),
    )
    op.create_index("ix_job_labels_seq_key", "job_labels", ["seq", "key"])
    op.create_index("ix_jobs_name_seq", "jobs", ["name", "seq"])


def downgrade() -> None:
    op.drop_index("ix_jobs_name_seq", "jobs")
    op.drop_table("job_labels")
