"""An empty store for each test: a SQLite file, and a schema of a real PostgreSQL where one is installed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.schema import CreateSchema

from service.store.jobs import Store
from service.store.records import JobRow
from tests import postgres

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[sa.URL]:
    if not postgres.found():
        pytest.skip("needs PostgreSQL's initdb and pg_ctl, and psycopg")
    with postgres.server() as server:
        yield server.url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an empty database is; on PostgreSQL a schema of the one server."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.sqlite3"
    server: sa.URL = request.getfixturevalue("postgresql")
    name = f"test{next(_numbers)}"
    engine = sa.create_engine(server)
    with engine.begin() as connection:
        connection.execute(CreateSchema(name))
    engine.dispose()
    own = server.update_query_dict({"options": f"-csearch_path={name}"})
    return own.render_as_string(hide_password=False)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = Store.open(url)
    yield opened
    opened.close()


Submit = Callable[..., JobRow]


@pytest.fixture
def submit(store: Store) -> Submit:
    def submit(uid: str, at: float = 1.0) -> JobRow:
        return store.submit({"name": uid}, uid, uid=uid, at=at, status={"attempt": 0})[0]

    return submit


class Child:
    """Another process: it opens the store and runs one line of Python when told to go."""

    def __init__(self, url: str, line: str) -> None:
        code = f"""
from service.store.jobs import Store
print(flush=True)
input()
store = Store.open({url!r})
{line}
"""
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "\n"

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        answer, _ = self._process.communicate(timeout=30)
        assert self._process.returncode == 0
        return answer.strip()


@pytest.fixture
def children() -> Callable[..., list[str]]:
    """Runs lines of Python on one store at the same moment, each in a process; gives what they printed."""

    def run(url: str, *lines: str) -> list[str]:
        started = [Child(url, line) for line in lines]
        for child in started:
            child.ready()
        for child in started:
            child.go()
        return [child.answer() for child in started]

    return run
