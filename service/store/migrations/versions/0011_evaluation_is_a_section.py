"""What a job evaluates on is a section of its spec: three fields of others go, as they stand in specs that are kept."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

JOBS = sa.table("jobs", sa.column("uid", sa.Text), sa.column("spec", sa.JSON), sa.column("core", sa.JSON))


def upgrade() -> None:
    _each(_moved)


def downgrade() -> None:
    _each(_back)


def _each(change: Any) -> None:
    connection = op.get_bind()
    for uid, spec, core in connection.execute(sa.select(JOBS.c.uid, JOBS.c.spec, JOBS.c.core)).all():
        values = {"spec": change(spec), "core": {**core, "spec": change(core["spec"])} if core else core}
        connection.execute(sa.update(JOBS).where(JOBS.c.uid == uid).values(**values))


def _moved(spec: dict[str, Any]) -> dict[str, Any]:
    data, train = dict(spec.get("data", {})), dict(spec.get("train", {}))
    source = data.pop("eval_source", None)
    every, batches = train.pop("eval_every", 100), train.pop("eval_batches", 8)
    asked = {"data": [{"source": source}], "every": every, "batches": batches, "keep_best": False} if source else None
    return {**spec, "data": data, "train": train, "eval": asked}


def _back(spec: dict[str, Any]) -> dict[str, Any]:
    asked = spec.get("eval") or {}
    others = {name: value for name, value in spec.items() if name != "eval"}
    if "data" in asked:
        others["data"] = {**others["data"], "eval_source": asked["data"][0]["source"]}
        others["train"] = {**others["train"], "eval_every": asked["every"], "eval_batches": asked["batches"]}
    return others
