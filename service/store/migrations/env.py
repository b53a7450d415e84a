"""Run by Alembic: migrates over the connection that `service.store.schema` hands in, inside its transaction.

To write the next revision, on a store that is at the newest one:
`alembic -x url=sqlite:////folder/store.sqlite3 revision --autogenerate -m "What changes"`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context

from service.store import models
from service.store.database import Database


def migrate(connection: sa.Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=models.metadata,
        render_as_batch=True,  # SQLite alters a table only by copying it
        transactional_ddl=True,
    )
    context.run_migrations()


if (given := context.config.attributes.get("connection")) is not None:
    migrate(given)
else:
    with Database(context.get_x_argument(as_dictionary=True)["url"]).write() as opened:
        migrate(opened)
