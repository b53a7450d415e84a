"""Intents with details; a checkpoint's size, and when it was verified."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("intents", sa.Column("data", sa.JSON, nullable=True))
    op.add_column("checkpoints", sa.Column("nbytes", sa.BigInteger, nullable=True))
    op.add_column("checkpoints", sa.Column("verified_at", sa.Double, nullable=True))


def downgrade() -> None:
    op.drop_column("checkpoints", "verified_at")
    op.drop_column("checkpoints", "nbytes")
    op.drop_column("intents", "data")
