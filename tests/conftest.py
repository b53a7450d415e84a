"""Fixtures that live for the session: one pool of torch processes."""

from __future__ import annotations

import os

os.environ["RAY_AUTH_MODE"] = "token"  # Ray reads it once, when it is imported

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    members = Pool(8)
    yield members
    members.end()
