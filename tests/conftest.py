"""Fixtures that live for the session: one pool of torch processes."""

from __future__ import annotations

import os
import re
import signal

os.environ["RAY_AUTH_MODE"] = "token"  # Ray reads it once, when it is imported

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool import Pool

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background: children too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    members = Pool(8)
    yield members
    members.end()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A mark that is ruled out for a whole file: it isn't even imported, since that alone takes seconds."""
    ruled_out = re.findall(r"not (\w+)", config.option.markexpr)
    if not ruled_out or not collection_path.name.startswith("test_"):
        return None
    marks = re.findall(r"^pytestmark = .*", collection_path.read_text(), re.MULTILINE)
    return True if any(f"mark.{name}" in mark for mark in marks for name in ruled_out) else None
