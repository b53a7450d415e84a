"""The whole OpenAPI document against the API, with every check of schemathesis: by the operator, and by nobody."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from service.contracts.job import Phase
from tests.api.world import TOKEN, World

pytestmark = pytest.mark.server

HERE = Path(__file__).parent / "openapi"


@pytest.fixture(scope="module")
def document(world: World, http: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an API that has a job at work, with events, a log and a checkpoint."""
    uid = world.submit().uid
    world.say(uid, "one", "two")
    world.log(uid, "logs/1/n1-0.jsonl", [(0, "a"), (1, "b")])
    world.checkpoint(uid, 5)
    world.move(uid, Phase.RUNNING)
    file = tmp_path_factory.mktemp("openapi") / "openapi.json"
    file.write_text(http.get("/v1/openapi.json").text)
    return file


@pytest.mark.parametrize("token", [TOKEN, ""], ids=["operator", "nobody"])
def test_every_answer_is_as_the_document_says(world: World, document: Path, tmp_path: Path, token: str) -> None:
    program = Path(sys.executable).with_name("schemathesis")
    given = ["--header", f"Authorization: Bearer {token}"] if token else []
    done = subprocess.run(
        [program, "--config-file", HERE / "schemathesis.toml", "run", document, "--url", world.url, *given,
         "--checks", "all", "--seed", "7", "--max-examples", "10", "--request-timeout", "20", "--no-color"],
        env={**os.environ, "SCHEMATHESIS_HOOKS": "tests.api.openapi.hooks", "PYTHONPATH": str(Path.cwd())},
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cases = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert cases is not None
    assert int(cases[2]) > 1000


def test_the_document_names_every_answer(document: Path) -> None:
    paths = json.loads(document.read_text())["paths"]
    for path, operations in paths.items():
        for method, operation in operations.items():
            assert operation.get("security") or path in ("/healthz", "/readyz")
            answers = operation["responses"]
            assert {"401", "403", "404", "422", "503"} <= set(answers), (method, path)
            problems = [answer for code, answer in answers.items() if code[0] in "45"]
            assert all(list(answer["content"]) == ["application/problem+json"] for answer in problems)
