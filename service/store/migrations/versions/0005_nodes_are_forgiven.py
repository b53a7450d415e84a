"""Nodes that an operator forgives, until the controller has done so."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "forgiven",
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("node", name="pk_forgiven"),
    )


def downgrade() -> None:
    op.drop_table("forgiven")
