"""One local fleet for the session: two racks of two nodes with two slots, a controller, an API; its store is a real
PostgreSQL where one is installed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.client import Client
from service.local import LocalFleet
from tests import postgres
from tests.e2e.world import World

HERE = Path(__file__).parent
SECRET = "hf_what-nobody-may-see"
"""In the environment of every node."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """More than the waits of a test take together, where all goes well."""
    for item in items:
        if item.path.parent == HERE and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def database() -> Iterator[postgres.Server | None]:
    with postgres.server() if postgres.found() else contextlib.nullcontext() as server:
        yield server


@pytest.fixture(scope="session")
def fleet(database: postgres.Server | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    before = dict(os.environ)
    os.environ["PHALANX_TEST_SECRET"] = SECRET
    os.environ["PHALANX_LIMITS"] = "settle_s=3,cooldown_s=1,step_s=15"
    if database is not None:
        os.environ["PHALANX_STORE"] = database.url.render_as_string(hide_password=False)
    local = LocalFleet(tmp_path_factory.mktemp("home"), api_port=0)
    local.start()
    yield local
    local.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def world(fleet: LocalFleet) -> Iterator[World]:
    """A client of the fleet; jobs that are left are cancelled, so that the next test finds all slots free."""
    with Client.find(fleet.home) as client:
        here = World(client, fleet)
        yield here
        here.clear()
