"""A job with its own model and a secret: every rank has both, the standbys too; it is shown nowhere (S8)."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from service.contracts.errors import UserError
from tests.e2e.conftest import SECRET
from tests.e2e.world import HALF, World

pytestmark = [pytest.mark.ray, pytest.mark.torch]

MODEL = """
import os
from pathlib import Path

from workers.models.example import ParallelDecoder


class Mine(ParallelDecoder):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        print(f"of {os.environ['TEAM']} with {os.environ['HF_TOKEN']}: {Path('mine/note.txt').read_text()}", flush=True)
"""


def packed(place: Path) -> str:
    path = place / "code.zip"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("mine/model.py", MODEL)
        made.writestr("mine/note.txt", "from the archive")
    return str(path)


def holding(secret: str, *folders: Path) -> list[str]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path) for path in files if secret.encode() in path.read_bytes()]


def test_own_code_and_a_secret_on_every_rank_and_in_no_record(world: World, tmp_path: Path) -> None:
    runtime = {
        "working_dir": packed(tmp_path),
        "env": {"TEAM": "vision"},
        "secrets": {"HF_TOKEN": "env:PHALANX_TEST_SECRET"},
    }
    resources = {**HALF["resources"], "standbys": True}
    uid = world.submit(**{**HALF, "resources": resources}, runtime=runtime, model={"family": "mine.model:Mine"})
    world.kill(uid, attempt=1, rank=0, after=6)
    view = world.finish(uid)
    assert view.status.attempt == 2
    assert view.spec["runtime"]["secrets"] == runtime["secrets"]
    lines = list(world.client.logs(uid))
    for attempt in (1, 2):
        told = {line.rank for line in lines if line.attempt == attempt and "from the archive" in line.text}
        assert told == {0, 1, 2, 3}
    assert any(line.text.startswith("of vision with [secret]: ") for line in lines)
    assert holding(SECRET, world.fleet.home, Path(world.fleet.temp)) == []


def test_a_secret_that_no_node_has_ends_the_job_and_is_named(world: World) -> None:
    uid = world.submit(**HALF, runtime={"secrets": {"HF_TOKEN": "env:NOT_ON_ANY_NODE"}})
    view = world.ended(uid)
    assert "the secret env:NOT_ON_ANY_NODE can't be had" in view.reason
    assert view.status.progress.step == 0


def test_code_that_can_t_be_imported_ends_the_job_at_once_with_its_traceback(world: World, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as made:
        made.writestr("bad/model.py", "import nothing_of_this_name\n")
    uid = world.submit(**HALF, runtime={"working_dir": f"{tmp_path}/bad.zip"}, model={"family": "bad.model:Mine"})
    view = world.ended(uid)
    assert view.status.attempt == 1
    assert "No module named 'nothing_of_this_name'" in view.reason
    assert view.status.exit is not None
    assert view.status.exit.kind == "code"
    assert "import nothing_of_this_name" in view.status.exit.traceback


def test_an_archive_that_was_replaced_is_not_run(world: World, tmp_path: Path) -> None:
    path = packed(tmp_path)
    with pytest.raises(UserError, match="is not what it was"):
        world.submit(**HALF, runtime={"working_dir": path, "digest": "0" * 64})
