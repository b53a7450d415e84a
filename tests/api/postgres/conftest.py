"""The API's tests again, on a real PostgreSQL where one is installed: each file in a database of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from tests import postgres
from tests.api.world import World

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.Server]:
    if not postgres.found():
        pytest.skip("needs PostgreSQL's initdb and pg_ctl, and psycopg")
    with postgres.server() as made:
        yield made


@pytest.fixture(scope="module")
def world(server: postgres.Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    name = f"api{next(_numbers)}"
    engine = sa.create_engine(server.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    url = server.url.set(database=name).render_as_string(hide_password=False)
    made = World(tmp_path_factory.mktemp("home"), url)
    yield made
    made.close()
