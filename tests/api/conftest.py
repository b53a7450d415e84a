"""A world for each test file: its store, its API, its home."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from api.cli.main import app
from tests.api.commands import Run
from tests.api.world import TOKEN, World, job


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


@pytest.fixture
def run(world: World) -> Run:
    def invoke(*words: str, given: str | None = None, **environ: str) -> Any:
        return CliRunner().invoke(
            app, list(words), input=given, env={"PHALANX_HOME": str(world.home), **environ}, terminal_width=80
        )

    return invoke


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job()))
    return path
