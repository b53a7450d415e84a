"""A world for each test file: its store, its API, its home."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.api.world import TOKEN, World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("home"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def http(world: World) -> Iterator[httpx.Client]:
    """Plain HTTP with the token."""
    with httpx.Client(base_url=world.url, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        yield client
