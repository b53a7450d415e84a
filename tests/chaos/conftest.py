"""One fleet of namespaces for the session; a test finds it whole, and leaves it so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.chaos import net
from tests.chaos.fleet import Fleet
from tests.e2e.world import until

WHOLE_S = 240.0


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if reason := net.missing():
        pytest.skip(reason)
    with Fleet(tmp_path_factory.mktemp("chaos"), redis=shutil.which("redis-server") is not None) as up:
        yield up


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    if "fleet" not in request.fixturenames:
        yield
        return
    up: Fleet = request.getfixturevalue("fleet")
    make_whole(up)
    yield
    make_whole(up)


def make_whole(fleet: Fleet) -> None:
    """Every host has a node, and the API knows them and no others."""
    for host in fleet.rack_of.keys() - fleet.up:
        fleet.join(host)
    until(lambda: not fleet.tend() and {node.name for node in fleet.client.nodes()} == fleet.up, "whole fleet", WHOLE_S)
