"""Own code and secrets: who may bring them along, and that nothing of a secret is ever shown (S8)."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from api import runtime
from api.door import Door
from api.rules import Rules
from service.contracts.errors import UserError
from service.contracts.job import parse_job
from tests.api.world import World, job

OWN = Rules(own_code=("vision",), secrets=("env:HF_TOKEN", "file:/etc/keys/{project}/", "kubernetes:shared-*"))
SHARED = "default"


def checked(asked: dict[str, Any], project: str = "vision", rules: Rules = OWN) -> Any:
    return runtime.checked(parse_job(job({"runtime": asked})), project, rules).runtime


def packed(place: Path) -> tuple[str, str]:
    path = place / "code.zip"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("mine/model.py", "x = 1\n")
    return str(path), hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("project", "secrets"),
    [
        ("vision", {"ANYTHING": "env:HF_TOKEN"}),
        ("vision", {"KEY": "file:/etc/keys/vision/a"}),
        (SHARED, {"HF_TOKEN": "env:HF_TOKEN"}),
        (SHARED, {"AWS_ACCESS_KEY_ID": "kubernetes:shared-s3/id"}),
        (SHARED, {"WANDB_API_KEY": "file:/etc/keys/default/wandb"}),
    ],
)
def test_secrets_that_may_be_named(project: str, secrets: dict[str, str]) -> None:
    assert checked({"secrets": secrets}, project).secrets == secrets


@pytest.mark.parametrize(
    ("project", "asked", "says"),
    [
        (SHARED, {"env": {"LD_PRELOAD": "/tmp/x.so"}}, "runtime.env: jobs of project default bring none here"),
        (SHARED, {"working_dir": "/srv/code.zip"}, "runtime.working_dir: jobs of project default bring none here"),
        (SHARED, {"secrets": {"LD_PRELOAD": "env:HF_TOKEN"}}, "have no such secret"),
        (SHARED, {"secrets": {"HF_TOKEN": "file:/etc/keys/vision/a"}}, "is not for project default"),
        ("vision", {"secrets": {"A": "file:/etc/keys/visions/a"}}, "is not for project vision"),
        ("vision", {"secrets": {"A": "env:HF_TOKEN_2"}}, "is not for project vision"),
        ("vision", {"secrets": {"A": "env:AWS_SECRET_ACCESS_KEY"}}, "is not for project vision"),
        ("vision", {"secrets": {"A": "kubernetes:other/key"}}, "is not for project vision"),
        ("vision", {"working_dir": "http://169.254.169.254/latest"}, "can't be used here"),
        ("vision", {"working_dir": "code.zip"}, "relative path"),
        ("vision", {"working_dir": "/no/such.zip"}, "can't be read from the API: FileNotFoundError"),
        ("vision", {"digest": "0" * 64}, "there is none"),
    ],
)
def test_what_may_not_be_brought_along(project: str, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        checked(asked, project)
    assert says in refused.value.message
    assert refused.value.field.startswith("runtime.")
    assert refused.value.hint


def test_code_is_known_by_its_digest(tmp_path: Path) -> None:
    path, digest = packed(tmp_path)
    assert checked({"working_dir": path}).digest == digest
    assert checked({"working_dir": path, "digest": digest}).digest == digest
    with pytest.raises(UserError, match="is not what it was"):
        checked({"working_dir": path, "digest": "0" * 64})
    (tmp_path / "code.zip").write_text("import os\n")
    with pytest.raises(UserError, match="is no zip archive") as refused:
        checked({"working_dir": path})
    assert "python -m zipfile" in refused.value.hint


def test_a_uri_holds_no_credentials_and_its_own_are_not_repeated() -> None:
    with pytest.raises(UserError, match="a URI holds no credentials") as refused:
        checked({"working_dir": "s3://key:hunter22@bucket/code.zip"})
    assert "hunter22" not in f"{refused.value.message}{refused.value.hint}"


def test_own_code_over_the_api(world: World, tmp_path: Path) -> None:
    path, digest = packed(tmp_path)
    asked = {"runtime": {"working_dir": path, "env": {"A": "b"}}, "model.family": "mine.model:Tiny"}
    with world.client() as client:
        for ask in (client.submit, client.dry_run):
            with pytest.raises(UserError, match="bring none here"):
                ask(job(asked))
        world.app.state.door = Door(world.store, world.root, Rules(own_code=("*",)))
        view = client.submit(job(asked))
    assert view.spec["runtime"] == {"env": {"A": "b"}, "secrets": {}, "working_dir": path, "digest": digest}
