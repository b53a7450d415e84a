"""One database: how it is opened, what a transaction is, what its clock says, what its failures mean here.

All that differs between SQLite and PostgreSQL is in this file. Knows nothing of the tables.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from service.contracts.errors import StoreUnavailable, UserError

BUSY_S = 10.0
IDLE_S = 1.0
_FORMS = "sqlite:////folder/store.sqlite3 or postgresql://user:password@host/database"


class now(FunctionElement[float]):
    """Unix seconds by the database's clock at this moment, not at the start of the transaction."""

    type = sa.Double()
    inherit_cache = True


@compiles(now, "sqlite")
def _now_sqlite(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _now_postgresql(*_: Any, **__: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"


def parse(url: str) -> sa.URL:
    """The URL of a database that can be the store; UserError says what would work."""
    try:
        parsed = sa.make_url(url)
    except (exc.ArgumentError, ValueError):  # the text may hold a password: it is not repeated
        raise UserError("the store's URL can't be read", hint=f"write {_FORMS}") from None
    kind = parsed.get_backend_name()
    if kind not in ("sqlite", "postgresql"):
        raise UserError(f"the store can't be kept in {kind}", hint=f"write {_FORMS}")
    if kind == "sqlite":
        file = parsed.database or ":memory:"
        if file == ":memory:" or "mode=memory" in url:
            raise UserError("an in-memory store can't be shared by processes", hint=f"write {_FORMS}")
        if not file.startswith("file:") and not Path(file).is_absolute():
            raise UserError(
                f"the store's file {file!r} is relative, and processes stand in different folders",
                hint=f"write sqlite:///{Path(file).absolute()}",
            )
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    return parsed


class Database:
    """Connections to one database, safe for threads. A transaction is all or nothing."""

    def __init__(self, url: str) -> None:
        self.url = parse(url)
        self.kind = self.url.get_backend_name()
        try:
            self._engine = sa.create_engine(self.url, json_serializer=_dumps, **_options(self.kind))
        except ImportError as error:
            raise UserError(f"the store's driver is missing: {error}", hint="install psycopg") from None
        if self.kind == "sqlite":
            event.listen(self._engine, "connect", _configure)
            event.listen(self._engine, "begin", _begin)
        else:
            event.listen(self._engine, "checkin", _used)
            event.listen(self._engine, "checkout", _alive)
        self._writer = self._engine.execution_options(phalanx_begin="BEGIN IMMEDIATE")
        self._single = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        # SQLite has one writer, and who finds it taken sleeps: threads of one process need not.
        self._turn = threading.Lock() if self.kind == "sqlite" else contextlib.nullcontext()

    def __str__(self) -> str:
        return self.url.render_as_string(hide_password=True)

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A transaction that sees one state of the database."""
        with self._failures(), self._engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def ask(self) -> Iterator[sa.Connection]:
        """For one query: nothing is begun or ended around it."""
        with self._failures(), self._single.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that commits at the end, or writes nothing when an error leaves it.

        SQLite takes its one write lock at the start: a transaction that first reads and then writes could
        otherwise find its reading outdated and fail without waiting.
        """
        with self._failures(), self._turn, self._writer.begin() as connection:
            yield connection

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except exc.TimeoutError as error:
            raise StoreUnavailable(f"no connection to the store {self} is free", hint="try again") from error
        except exc.DBAPIError as error:
            if isinstance(error, exc.IntegrityError | exc.DataError | exc.ProgrammingError | exc.InternalError):
                raise  # a row or a query breaks a rule: our own fault, and another try won't help
            cause = str(error.orig).strip()
            message = f"the store {self} can't be used: {cause}"
            raise StoreUnavailable(message, hint=self._hint(cause)) from error

    def _hint(self, cause: str) -> str:
        if self.kind != "sqlite":
            return "is the database up, and does the URL name a user and a database that exist?"
        if "locked" in cause:
            return f"another process held the write lock for {BUSY_S:g} s; try again"
        if "not a database" in cause or "malformed" in cause:
            return "the file is damaged or not a store; name another file, or bring it back from a copy"
        return "the folder must exist, and it and the file must be writable"


def insert(connection: sa.Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that knows ON CONFLICT, which both databases spell alike."""
    return (sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert)(table)


def storable(text: str) -> str:
    """What a rank or a user wrote, without what a database refuses: half surrogate pairs and NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def lock_schema(connection: sa.Connection) -> None:
    """Until this transaction ends no other process gets past here."""
    if connection.dialect.name == "postgresql":  # SQLite's write transaction excludes others by itself
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(0x9A1A)))


def _options(kind: str) -> dict[str, Any]:
    if kind == "sqlite":
        return {"connect_args": {"timeout": BUSY_S}}
    return {"connect_args": {"connect_timeout": int(BUSY_S)}}


def _used(connection: Any, record: Any) -> None:
    record.info["used_at"] = time.monotonic()


def _alive(connection: Any, record: Any, _: Any) -> None:
    """A connection that was idle for a while may have lost its server: it is asked before it is used."""
    if time.monotonic() - record.info.get("used_at", 0.0) > IDLE_S:
        try:
            connection.execute("SELECT 1")
            connection.rollback()
        except Exception as error:
            raise exc.DisconnectionError(str(error)) from error


def _configure(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # the driver begins no transaction of its own: _begin does
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = NORMAL")
    deadline = time.monotonic() + BUSY_S
    while True:  # two that make a new file WAL at once fail without the driver's wait
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _begin(connection: sa.Connection) -> None:
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return
    connection.exec_driver_sql(connection.get_execution_options().get("phalanx_begin", "BEGIN"))


def _dumps(value: Any) -> str:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, default=_plain)
    except ValueError:
        text = json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, default=_plain)
    return storable(text)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} can't be kept as JSON")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
