from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa

from service.contracts.errors import StoreUnavailable, UserError
from service.store import database
from service.store.jobs import Store


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://", "in-memory"),
        ("sqlite:///:memory:", "in-memory"),
        ("sqlite:///file::memory:?uri=true&mode=memory", "in-memory"),
        ("sqlite:///store.sqlite3", "relative"),
        ("mysql://host/name", "mysql"),
        ("no url: secret", "can't be read"),
        ("postgresql://user:secret@host:port/name", "can't be read"),
    ],
)
def test_what_can_not_be_the_store(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        database.parse(url)
    assert "sqlite:///" in refused.value.hint
    assert "secret" not in f"{refused.value} {refused.value.hint}"


def test_postgresql_is_reached_by_the_driver_that_we_install() -> None:
    assert database.parse("postgresql://user@host/name").drivername == "postgresql+psycopg"
    assert database.parse("postgresql+psycopg2://user@host/name").drivername == "postgresql+psycopg2"


def _missing_folder(folder: Path) -> str:
    return f"sqlite:///{folder}/none/store.sqlite3"


def _a_folder(folder: Path) -> str:
    return f"sqlite:///{folder}"


def _not_a_database(folder: Path) -> str:
    (folder / "store.sqlite3").write_text("what a database does not begin with, however long one reads on" * 20)
    return f"sqlite:///{folder}/store.sqlite3"


def _read_only(folder: Path) -> str:
    sqlite3.connect(folder / "store.sqlite3").close()
    return f"sqlite:///file:{folder}/store.sqlite3?mode=ro&uri=true"


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        (_missing_folder, "folder must exist"),
        (_a_folder, "folder must exist"),
        (_read_only, "writable"),
        (_not_a_database, "damaged"),
    ],
)
def test_a_file_that_can_not_be_used(tmp_path: Path, place, hint: str) -> None:
    with pytest.raises(StoreUnavailable, match="the store sqlite") as refused:
        Store.open(place(tmp_path))
    assert hint in refused.value.hint


def test_opening_without_migrating_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="no store at") as refused:
        Store.open(f"sqlite:///{tmp_path}/store.sqlite3", migrate=False)
    assert "controller" in refused.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_becomes_read_only_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    writer = Store.open(f"sqlite:///{path}")
    reader = Store.open(f"sqlite:///file:{path}?mode=ro&uri=true", migrate=False)
    writer.submit({}, "n", uid="a", at=1.0, status={})
    assert reader.job("a").uid == "a"
    with pytest.raises(StoreUnavailable, match="readonly"):
        reader.submit({}, "n", uid="b", at=1.0, status={})
    writer.close()
    reader.close()


def test_a_file_that_another_holds_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    path = tmp_path / "store.sqlite3"
    store = Store.open(f"sqlite:///{path}")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked") as refused:
        store.acquire("me", 60)
    assert "try again" in refused.value.hint
    store.ping()
    other.execute("ROLLBACK")
    assert store.acquire("me", 60) == 1
    other.close()
    store.close()


def test_the_clock_is_the_databases(url: str) -> None:
    opened = database.Database(url)
    with opened.read() as connection:
        first, second = (connection.execute(sa.select(database.now())).scalar_one() for _ in range(2))
    assert isinstance(first, float)
    assert 0 <= second - first < 60
    assert first > 1.7e9
    opened.close()


def test_a_database_that_is_down(postgresql: sa.URL, tmp_path: Path) -> None:
    nobody = postgresql.update_query_dict({"host": str(tmp_path)}).set(password="secret")
    with pytest.raises(StoreUnavailable, match="can't be used") as refused:
        Store.open(nobody.render_as_string(hide_password=False))
    assert "database up" in refused.value.hint
    assert "secret" not in f"{refused.value} {refused.value.hint}"


@pytest.mark.parametrize("idle", [True, False])
def test_a_broken_connection_is_replaced(postgresql: sa.URL, monkeypatch: pytest.MonkeyPatch, idle: bool) -> None:
    monkeypatch.setattr(database, "IDLE_S", 0.0 if idle else 60.0)
    opened = database.Database(postgresql.render_as_string(hide_password=False))
    pid = sa.select(sa.func.pg_backend_pid())
    with opened.read() as connection:
        first = connection.execute(pid).scalar_one()
    other = database.Database(postgresql.render_as_string(hide_password=False))
    with other.read() as connection:
        connection.execute(sa.select(sa.func.pg_terminate_backend(first)))
    if not idle:  # once: the others of the pool are given up with it
        with pytest.raises(StoreUnavailable), opened.read() as connection:
            connection.execute(pid)
    with opened.read() as connection:
        assert connection.execute(pid).scalar_one() != first
    opened.close()
    other.close()
