"""Brings a database to the newest revision of the tables. Safe from many processes and threads at once."""

from __future__ import annotations

import threading
from pathlib import Path

import alembic.command
import alembic.config
import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from service.contracts.errors import StoreUnavailable
from service.store.database import Database, lock_schema

MIGRATIONS = Path(__file__).parent / "migrations"

_one_at_a_time = threading.Lock()  # Alembic keeps the migration under way in globals


def config(connection: sa.Connection | None = None) -> alembic.config.Config:
    """Alembic's configuration; with a connection, for migrating over it in its own transaction."""
    made = alembic.config.Config(attributes={"connection": connection})
    made.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    made.set_main_option("path_separator", "os")
    return made


def prepare(database: Database, migrate: bool) -> None:
    """Have the tables at the newest revision; without `migrate`, StoreUnavailable when they are not."""
    script = ScriptDirectory.from_config(config())
    newest = script.get_current_head()
    if not migrate and database.kind == "sqlite":
        _check_file(database)
    with database.read() as connection:
        current = _revision(connection)
    if current == newest:
        return
    if current is not None and current not in {revision.revision for revision in script.walk_revisions()}:
        raise StoreUnavailable(
            f"the store {database} is at revision {current}, newer than this Phalanx, which knows {newest}",
            hint="run the Phalanx that made it, or a newer one",
        )
    if not migrate:
        raise StoreUnavailable(
            f"the store {database} is at revision {current or 'none'}; this Phalanx needs {newest}",
            hint="start the controller of this version first: it migrates the store",
        )
    with _one_at_a_time, database.write() as connection:
        lock_schema(connection)
        alembic.command.upgrade(config(connection), "head")


def _revision(connection: sa.Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _check_file(database: Database) -> None:
    """SQLite makes a missing file; whoever only opens the store must not."""
    file = database.url.database or ""
    if not file.startswith("file:") and not Path(file).exists():
        raise StoreUnavailable(f"there is no store at {file}", hint="start the controller first: it makes the store")
