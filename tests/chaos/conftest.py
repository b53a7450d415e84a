"""One fleet of namespaces for the session; a test leaves it as it found it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.chaos import net
from tests.chaos.fleet import Fleet


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if reason := net.missing():
        pytest.skip(reason)
    with Fleet(tmp_path_factory.mktemp("chaos"), redis=shutil.which("redis-server") is not None) as up:
        yield up
