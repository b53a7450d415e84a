"""A step that a real run did, done again by `phalanx replay` in processes of its own: the promise that it makes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from service.contracts import events
from service.contracts.job import Phase, parse_job
from service.runtime import rows
from service.store.records import CheckpointRow
from tests.api.commands import Run
from tests.api.test_cli_replay import placed
from tests.api.world import World
from tests.pool import Pool
from tests.workers.test_trainer import heard, train
from workers.reports import StepDone
from workers.spec import ParallelLayout

pytestmark = pytest.mark.torch

STEPS = 6
JOB = {
    "model": {"layers": 4, "hidden": 32, "heads": 8, "kv_heads": 2, "ffn_hidden": 48, "seq_len": 16},
    "train": {"steps": STEPS, "global_batch": 12, "learning_rate": 1e-2, "precision": "float64", "seed": 5},
    "checkpoint": {"every_steps": 2},
}


def trained(world: World, pool: Pool, place: Path, layout: dict[str, int]) -> str:
    """A job that is over, as its controller would have left it; its folder is that of a run without a service."""
    uid, made = world.submit(JOB).uid, ParallelLayout(**layout)
    run = parse_job(world.store.job(uid).spec).run(made)
    said, manifests = train(pool, place, run, 1)
    shutil.copytree(place / "run", Path(world.root, uid))
    done = [events.Step(**dataclasses.asdict(one)) for one in heard(said, StepDone)]
    record(world, uid, done)
    world.commit(
        events=[placed(uid, 1, made)],
        checkpoints=[CheckpointRow(uid, step, 1, path, 1.0) for step, path in manifests.items()],
    )
    world.move(uid, Phase.RUNNING, step=STEPS)
    return uid


def record(world: World, uid: str, done: list[events.Step]) -> None:
    """As the controller writes them."""
    world.commit(metrics=rows.metrics([events.StepsCompleted(uid, 1, tuple(done), 1.0)]))


def told(run: Run, exit_code: int, *words: str) -> dict[str, Any]:
    done = run("replay", *words, "--json")
    assert done.exit_code == exit_code, done.output
    return json.loads(done.stdout)


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("layout", [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_a_step_is_what_it_was_and_the_jobs_folder_is_as_it_was(
    world: World, run: Run, pool: Pool, tmp_path: Path, layout: dict[str, int]
) -> None:
    uid = trained(world, pool, tmp_path, layout)
    before = files(Path(world.root, uid))
    found = told(run, 0, uid, "--step", "6")
    assert found["verdict"]["kind"] == "same"
    assert found["start"]["step"] == 4
    assert [(one["step"], one["same"], one["loss"]) for one in found["steps"]] == [
        (one["step"], True, one["recorded_loss"]) for one in found["steps"]
    ]
    assert [one["step"] for one in found["steps"]] == [5, 6]
    alone = told(run, 0, uid, "--step", "5", "--one", "--from", "2")
    assert alone["verdict"]["kind"] in ("same", "rounding")
    assert [one["step"] for one in alone["steps"]] == [3, 4, 5]
    assert all(one["apart"] < 1e-9 for one in alone["steps"])
    assert files(Path(world.root, uid)) == before


def test_a_wrong_figure_is_found_and_named_and_people_read_a_sentence(
    world: World, run: Run, pool: Pool, tmp_path: Path
) -> None:
    uid = trained(world, pool, tmp_path, {"dp": 2})
    with world.client() as client:
        rows_ = {row.step: row.model_dump() for row in client.metrics(uid)}
    names = [field.name for field in dataclasses.fields(events.Step)]
    wrong = {**rows_[2], "loss": math.nextafter(rows_[2]["loss"], 9)}
    record(world, uid, [events.Step(**{name: wrong[name] for name in names})])
    found = told(run, 1, uid, "--step", "3", "--from", "0")
    assert (found["verdict"]["kind"], found["verdict"]["step"]) == ("differs", 2)
    assert [one["same"] for one in found["steps"]] == [True, False, True]
    done = run("replay", uid, "--step", "2")
    assert done.exit_code == 1
    assert "steps 1 to 2 once more from the seed, as dp 2" in done.output
    assert f"step 2 is the first that differs: loss {rows_[2]['loss']!r} here" in done.output


def test_data_that_is_not_here_and_a_checkpoint_that_is_not_whole_are_said(
    world: World, run: Run, pool: Pool, tmp_path: Path
) -> None:
    uid = trained(world, pool, tmp_path, {})
    for shard in Path(world.root, uid, "checkpoints").rglob("*.bin"):
        os.truncate(shard, 10)
    done = run("replay", uid, "--step", "3")
    assert done.exit_code == 2
    assert "the checkpoint of step 2 can't be loaded" in done.output
    assert "have to be readable from here" in done.output
