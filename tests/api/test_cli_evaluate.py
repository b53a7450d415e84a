"""`phalanx plan evaluate`, without an API."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli import evaluate
from api.cli.main import app
from tests.service.core.plan.test_evaluate import BROKEN, SWEEP


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(SWEEP[0]))
        table.writeheader()
        table.writerows([*SWEEP, BROKEN])
    return path


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", "evaluate", *words])


def test_the_last_line_has_the_figures(runs: Path) -> None:
    done = invoke(str(runs), "--json")
    assert done.exit_code == 0, done.output
    last = json.loads(done.output.splitlines()[-1])
    assert (last["rows_used"], last["rows_skipped"]) == (4, 1)
    assert set(last["step_time"]) == {"mean", "median", "p90", "worst", "kendall_tau"}
    assert set(last["regret"]) == {"mean", "worst", "groups"}
    assert {"probed", "memory", "by_source"} <= set(last)


def test_a_picture_has_a_mark_for_each_run_in_scope(runs: Path, tmp_path: Path) -> None:
    assert invoke(str(runs), "--svg", str(tmp_path / "it.svg")).exit_code == 0
    root = ElementTree.parse(tmp_path / "it.svg").getroot()
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == 3 + 1  # and one in the key


def test_the_readme_is_written_in_its_place_and_again(runs: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    (tmp_path / evaluate.PICTURE).parent.mkdir(parents=True)
    readme.write_text(f"before\n{evaluate.BEGIN}\nold\n{evaluate.END}\nafter\n")
    for _ in range(2):
        assert invoke(str(runs), "--readme", str(readme)).exit_code == 0
        text = readme.read_text()
        assert text.startswith("before\n")
        assert text.endswith("\nafter\n")
        assert "old" not in text
        assert text.count("| all 3 |") == 1
        assert (tmp_path / evaluate.PICTURE).exists()


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, [], "can't be read"),
        ("a,b\n1,2\n", [], "has no run that can be judged; the first was left out because of"),
        ("", [], "has no run that can be judged"),
        ("\x00\xff", [], "runs.csv"),
    ],
)
def test_what_is_no_table_of_runs_is_said(tmp_path: Path, content: str | None, words: list[str], message: str) -> None:
    path = tmp_path / "runs.csv"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    done = invoke(str(path), *words)
    assert done.exit_code == 2
    assert message in done.output


def test_a_readme_without_the_place_is_left_alone(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing marked")
    done = invoke(str(runs), "--readme", str(tmp_path / "README.md"))
    assert done.exit_code == 2
    assert "has no place for the table" in done.output
    assert (tmp_path / "README.md").read_text() == "nothing marked"
