"""The NVLink domain of a node, and the kind of its accelerators."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("nvlink", "accelerator"):
        op.add_column("nodes", sa.Column(name, sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    for name in ("accelerator", "nvlink"):
        op.drop_column("nodes", name)
