"""`phalanx simulate`, without an API."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from api.cli.main import app
from service.sim import phases

Run = Callable[..., Any]

JOB = {
    "model": {"layers": 8, "hidden": 64, "heads": 8, "seq_len": 16},
    "data": {},
    "train": {"steps": 10**6, "global_batch": 24},
    "resources": {"slots": 8},
    "parallel": {"dp": 4, "pp": 2},
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "fleet.yaml").write_text("{nodes: 5, slots: 2, rack: 2}")

    def invoke(*words: str) -> Any:
        files = ["--job", str(tmp_path / "job.yaml"), "--fleet", str(tmp_path / "fleet.yaml")]
        return CliRunner().invoke(app, ["simulate", *files, "--days", "2", "--step-s", "5", *words])

    return invoke


def test_a_table_of_goodput_and_losses(run: Run) -> None:
    done = run("--faults", "rates:aws-p3-spot", "--baseline", "--elastic")
    assert done.exit_code == 0, done.output
    assert "phalanx" in done.stdout
    assert "baseline" in done.stdout
    for row in ("goodput, of the slots alive", "lost to restart", "lost to smaller layout", "attempts"):
        assert row in done.stdout


def test_json_csv_and_picture(run: Run, tmp_path: Path) -> None:
    files = ["--csv", str(tmp_path / "o.csv"), "--svg", str(tmp_path / "o.svg")]
    done = run("--faults", "rates:aws-p3-spot", "--json", "--seed", "3", "--standbys", "--phase", "stop_s=2", *files)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert set(told) == {"setting", "phalanx"}
    assert told["setting"]["phases"]["stop_s"] == 2
    assert told["setting"]["phases"]["start_s"] == phases.STANDBY_START_S
    assert 0 < told["phalanx"]["goodput"] < 1
    assert told["phalanx"]["elapsed_s"] == 2 * 86_400
    with (tmp_path / "o.csv").open() as file:
        assert len(list(csv.DictReader(file))) > 10
    ElementTree.parse(tmp_path / "o.svg")
    assert json.loads(run("--faults", "rates:aws-p3-spot", "--json", "--seed", "3").stdout) != told
    again = run("--faults", "rates:aws-p3-spot", "--json", "--seed", "3", "--standbys", "--phase", "stop_s=2")
    assert json.loads(again.stdout) == told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--faults", "rates:moon"], "no failure rates"),
        (["--faults", "/no/such"], "can't be read"),
        (["--phase", "speed=1"], "no phase"),
        (["--csv", "/no/such/folder/o.csv"], "can't be written"),
        (["--incidents", "/no/such"], "can't be read"),
    ],
)
def test_what_is_wrong_is_told(run: Run, words: list[str], says: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert says in done.stderr


def test_a_job_that_does_not_fit_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("{nodes: 3, slots: 2}")
    done = run()
    assert done.exit_code == 2
    assert "needs 8 gpu slots; the fleet has 6" in done.stderr
