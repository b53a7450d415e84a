"""What is held against nodes, and when a node goes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("draining", sa.Double, nullable=True))
    op.create_table(
        "node_health",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_node_health"),
    )


def downgrade() -> None:
    op.drop_table("node_health")
    op.drop_column("nodes", "draining")
