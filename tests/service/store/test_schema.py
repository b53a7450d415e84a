from __future__ import annotations

import argparse
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import alembic.command
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from service.contracts.errors import StoreUnavailable
from service.store import models, schema
from service.store.database import Database
from service.store.jobs import Store
from service.store.records import CheckpointRow


def test_opening_twice_keeps_what_is_there(url: str) -> None:
    for uid in "ab":
        store = Store.open(url)
        store.submit({}, "n", uid=uid, at=1.0, status={})
        store.close()
    store = Store.open(url, migrate=False)
    assert [job.uid for job in store.jobs()] == ["b", "a"]
    store.close()


def test_many_threads_may_make_the_store(url: str) -> None:
    gate = threading.Barrier(4)

    def make(_: int) -> None:
        gate.wait(timeout=10)
        store = Store.open(url)
        store.ping()
        store.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, range(4)))


def test_the_models_are_what_the_migrations_make(url: str) -> None:
    Store.open(url).close()
    database = Database(url)
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), models.metadata) == []
    database.close()


def test_a_migration_can_be_taken_back(url: str) -> None:
    Store.open(url).close()
    database = Database(url)
    with database.write() as connection:
        alembic.command.downgrade(schema.config(connection), "base")
    with database.read() as connection:
        assert sa.inspect(connection).get_table_names() == ["alembic_version"]
    database.close()


def test_a_store_of_the_first_tables_keeps_its_rows(url: str) -> None:
    database = Database(url)
    with database.write() as connection:
        alembic.command.upgrade(schema.config(connection), "0001")
    rows = {
        "jobs": {"uid": "a", "seq": 1, "name": "n", "phase": "running", "reason": "", "spec": {}, "status": {},
                 "created_at": 1.0, "updated_at": 1.0, "cancel_requested": True},
        "intents": {"job": "a", "kind": "cancel", "at": 1.0, "done": False},
        "checkpoints": {"job": "a", "step": 4, "attempt": 1, "manifest": "m4", "published_at": 2.0},
    }  # fmt: skip
    with database.write() as connection:
        for name, row in rows.items():
            columns = [column for column in models.metadata.tables[name].c if column.name in row]
            plain = sa.table(name, *(sa.column(column.name, column.type) for column in columns))
            connection.execute(sa.insert(plain).values(**row))
    database.close()
    store = Store.open(url)
    assert store.checkpoints("a") == [CheckpointRow("a", 4, 1, "m4", 2.0)]
    assert [(intent.kind, intent.data) for intent in store.intents()] == [("cancel", {})]
    store.close()


OLD = {"data": {"source": "s", "eval_source": "e.txt"}, "train": {"steps": 9, "eval_every": 4, "eval_batches": 2}}
NEW = {
    "data": {"source": "s"},
    "train": {"steps": 9},
    "eval": {"data": [{"source": "e.txt"}], "every": 4, "batches": 2, "keep_best": False},
}
OF_OTHERS = {"data": {"source": "s"}, "train": {"steps": 9}}


def test_what_a_job_evaluates_on_becomes_a_section_and_goes_back(url: str) -> None:
    before = {"a": OLD, "b": {"data": {**OLD["data"], "eval_source": None}, "train": OLD["train"]}}
    jobs = sa.table("jobs", *(sa.column(name, models.jobs.c[name].type) for name in ("uid", "spec", "core")))

    def stored() -> dict[str, Any]:
        with database.read() as connection:
            return {uid: (spec, core) for uid, spec, core in connection.execute(sa.select(jobs))}

    store = Store.open(url)
    for uid, spec in before.items():
        store.submit(spec, "n", uid=uid, at=1.0, status={})
    store.close()
    database = Database(url)
    with database.write() as connection:
        connection.execute(sa.update(jobs).where(jobs.c.uid == "a").values(core={"uid": "a", "spec": OLD}))
        alembic.command.stamp(schema.config(connection), "0010")
    Store.open(url).close()
    assert stored() == {"a": (NEW, {"uid": "a", "spec": NEW}), "b": ({**OF_OTHERS, "eval": None}, None)}
    with database.write() as connection:
        alembic.command.downgrade(schema.config(connection), "0010")
    assert stored() == {"a": (OLD, {"uid": "a", "spec": OLD}), "b": (OF_OTHERS, None)}
    database.close()


def test_the_next_revision_can_be_written(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    Store.open(url).close()
    folder = shutil.copytree(schema.MIGRATIONS, tmp_path / "migrations")
    config = schema.config()
    config.set_main_option("script_location", str(folder))
    config.cmd_opts = argparse.Namespace(x=[f"url={url}"])
    alembic.command.revision(config, "Nothing new", autogenerate=True, rev_id="9999")
    text = (folder / "versions" / "9999_nothing_new.py").read_text()
    assert text.startswith('"""Nothing new."""')
    assert "down_revision = '0011'" in text
    compile(text, "9999", "exec")


@pytest.mark.parametrize(
    ("revision", "migrate", "message"),
    [
        (None, False, "at revision none"),
        ("9999", False, "newer than this"),
        ("9999", True, "newer than this"),
    ],
)
def test_a_store_of_another_version_is_refused(url: str, revision: str | None, migrate: bool, message: str) -> None:
    Store.open(url).close()
    database = Database(url)
    with database.write() as connection:
        table = sa.table("alembic_version", sa.column("version_num"))
        connection.execute(sa.update(table).values(version_num=revision) if revision else sa.delete(table))
    database.close()
    with pytest.raises(StoreUnavailable, match=message) as refused:
        Store.open(url, migrate=migrate)
    assert refused.value.hint
