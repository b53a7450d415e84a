"""How long the parts of a step took each rank."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rank_times",
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("parts", sa.JSON, nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.uid"], name="fk_rank_times_job"),
        sa.PrimaryKeyConstraint("job", "at", name="pk_rank_times"),
    )


def downgrade() -> None:
    op.drop_table("rank_times")
