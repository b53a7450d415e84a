"""Sweeps: combinations, what is submitted once, what is compared, what is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from api import sweep
from api.cli import tables
from service.contracts import errors
from service.contracts.job import Phase
from tests.api.commands import Run
from tests.api.world import World, job

RATES = ("--over", "train.learning_rate=1e-4,3e-4")


@pytest.mark.parametrize(
    ("grid", "made"),
    [
        ({"a": [1, 2]}, [{"a": 1}, {"a": 2}]),
        ({"a": [1, 2], "b.c": ["x", "y"]}, [{"a": a, "b.c": c} for a in (1, 2) for c in ("x", "y")]),
        ({"a": [1, 1, 1.0, True, "1"]}, [{"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}]),
        ({"a": [[1], [2]]}, [{"a": [1]}, {"a": [2]}]),
    ],
)
def test_combinations(grid: sweep.Grid, made: list[Any]) -> None:
    assert [json.dumps(one) for one in sweep.combinations(grid)] == [json.dumps(one) for one in made]


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ({}, "1 to 1000 jobs, not 0"),
        ({"a": []}, "no values for a"),
        ({"a": list(range(1001))}, "not 1001"),
        ({"a": list(range(100)), "b": list(range(100))}, "not 10000"),
    ],
)
def test_grids_that_are_none(grid: sweep.Grid, says: str) -> None:
    with pytest.raises(errors.UserError, match=says):
        sweep.combinations(grid)


def test_a_value_is_set_at_its_path_and_nothing_else_changes() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": 3}
    assert sweep.changed(base, {"a.b": 9, "e.f": 4}) == {"a": {"b": 9, "c": 2}, "d": 3, "e": {"f": 4}}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3}


@pytest.mark.parametrize("path", ["d.x", "a..b", ".a", "a."])
def test_paths_that_lead_nowhere(path: str) -> None:
    with pytest.raises(errors.UserError, match="leads to no field"):
        sweep.changed({"a": {}, "d": 3}, {path: 1})


def submitted(run: Run, file: Path, *words: str) -> dict[str, Any]:
    done = run("sweep", "submit", str(file), "--json", *words)
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def test_a_job_a_combination_linked_by_labels(run: Run, world: World, file: Path) -> None:
    told = submitted(run, file, *RATES, "--over", "data.source=builtin:topics", "--over", "train.betas=[0.9,0.99]")
    assert [one["values"] for one in told["jobs"]] == [
        {"data.source": "builtin:topics", "train.betas": [0.9, 0.99], "train.learning_rate": rate}
        for rate in (1e-4, 3e-4)
    ]
    with world.client() as client:
        found = list(client.list(labels={"sweep": told["sweep"]}, oldest=True))
        assert [one.uid for one in found] == [one["uid"] for one in told["jobs"]]
        labels = found[0].spec["labels"]
        assert [labels[f"sweep/{path}"] for path in ("train.learning_rate", "data.source", "train.betas")] == [
            "0.0001", "builtin-topics", "0.9-0.99",
        ]  # fmt: skip
        one = list(client.list(labels={"sweep/train.learning_rate": "0.0003", "sweep": told["sweep"]}))
    assert [job.uid for job in one] == [told["jobs"][1]["uid"]]


def test_the_file_may_hold_the_sweep_and_variables(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    grid = {"vars.rate": ["1e-3", 2e-3], "train.seed": [1, 2]}
    changes = {"vars": {"rate": 1, "b": 8}, "train.learning_rate": "${rate}", "train.global_batch": "${b}"}
    file.write_text(yaml.safe_dump({**job(changes), "sweep": grid}))
    told = submitted(run, file, "--over", "train.seed=3", "--var", "b=16")["jobs"]
    assert [one["values"] for one in told] == [
        {"train.seed": 3, "vars.rate": "0.001"}, {"train.seed": 3, "vars.rate": "0.002"},
    ]  # fmt: skip
    assert json.loads(run("get", told[1]["uid"], "-o", "json").stdout)["spec"]["train"]["learning_rate"] == 2e-3
    for words in (("submit",), ("plan",)):
        done = run(*words, str(file))
        assert (done.exit_code, "is a sweep of several jobs" in done.stderr) == (2, True)
    done = run("sweep", "submit", str(file), "--var", "rate=1")
    assert "rate is swept over, and given" in done.stderr


def test_the_same_id_submits_nothing_twice(run: Run, world: World, file: Path) -> None:
    made = [one["uid"] for one in submitted(run, file, *RATES, "--id", "same")["jobs"]]
    assert [one["uid"] for one in submitted(run, file, *RATES, "--id", "same")["jobs"]] == made
    more = submitted(run, file, "--over", "train.learning_rate=1e-3,3e-4,1e-4", "--id", "same")["jobs"]
    assert [one["uid"] for one in more[:0:-1]] == made
    file.write_text(yaml.safe_dump(job({"train.steps": 30})))
    done = run("sweep", "submit", str(file), *RATES, "--id", "same")
    assert (done.exit_code, "the rest of it is another job's" in done.stderr) == (2, True)
    with world.client() as client:
        assert len(sweep.jobs(client, "same")) == 3


def test_two_at_once_submit_nothing_twice(world: World) -> None:
    members = [sweep.Member({"train.seed": seed}, job({"train.seed": seed})) for seed in range(4)]
    found: list[list[str]] = []

    def submit() -> None:
        with world.client() as client:
            found.append([one.uid for one in sweep.submit(client, "both", members)])

    threads = [threading.Thread(target=submit) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 2
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--over", "train.learning_rate=1e-3,fast"), "train.learning_rate=fast: "),
        (("--over", "train.colour=1,2"), "unknown field 'colour'"),
        (("--over", "train.seed"), "'train.seed' changes nothing"),
        (("--over", "train.seed=[1"), "can't be read"),
        (("--over", "name.x=1"), "leads to no field"),
        ((), "1 to 1000 jobs, not 0"),
        ((*RATES, "--id", "a b"), "'a b' is no id"),
        ((*RATES, "--project", "nowhere"), "nowhere"),
    ],
)
def test_nothing_is_submitted_where_one_is_wrong(
    run: Run, world: World, file: Path, words: tuple[str, ...], says: str
) -> None:
    with world.client() as client:
        before = [job.uid for job in client.list()]
        done = run("sweep", "submit", str(file), *words)
        assert (done.exit_code, says in done.stderr, len(done.stderr.splitlines()) <= 2) == (2, True, True), done.stderr
        assert [job.uid for job in client.list()] == before


def test_a_dry_run_submits_nothing(run: Run, world: World, file: Path) -> None:
    assert run("sweep", "submit", str(file), *RATES, "--id", "dry", "--dry-run").stdout == "2 jobs can be submitted\n"
    assert (run("sweep", "show", "dry").exit_code, run("sweep", "cancel", "no such").exit_code) == (2, 2)


def test_show_puts_the_best_first(run: Run, world: World, file: Path) -> None:
    a, b, c = (one["uid"] for one in submitted(run, file, "--over", "train.seed=1,2,3", "--id", "ranked")["jobs"])
    world.move(a, Phase.RUNNING, step=7, loss=3.0)
    world.move(b, Phase.RUNNING, step=9, loss=2.0)

    def order() -> list[str]:
        return [one["uid"] for one in json.loads(run("sweep", "show", "ranked", "--json").stdout)["jobs"]]

    assert order() == [b, a, c]
    world.move(a, Phase.RUNNING, step=7, loss=3.0, eval_loss=2.5, eval_step=5)
    assert order() == [a, b, c]
    world.move(c, Phase.RUNNING, step=9, loss=4.0, eval_loss=2.75, eval_step=9, eval_best=2.25, eval_best_step=5)
    assert order() == [c, a, b]
    lines = run("sweep", "show", "ranked").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["JOB", "SEED", "PHASE", "STEP", "LOSS", "EVAL"],
        [c, "3", "running", "9/20", "4.0000", "2.2500"],
        [a, "1", "running", "7/20", "3.0000", "2.5000"],
        [b, "2", "running", "9/20", "2.0000", "-"],
    ]


def test_columns_are_whole_paths_where_their_ends_are_alike(world: World) -> None:
    grid = {"train.seed": [1], "labels.seed": ["x"]}
    members = [sweep.Member(each, sweep.changed(job(), each)) for each in sweep.combinations(grid)]
    with world.client() as client:
        table = tables.members(list(sweep.submit(client, "alike", members)))
    assert [str(column.header) for column in table.columns][1:3] == ["LABELS.SEED", "TRAIN.SEED"]


def test_cancel_ends_those_that_are_not_over(run: Run, world: World, file: Path) -> None:
    a, b, c = (one["uid"] for one in submitted(run, file, "--over", "train.seed=1,2,3", "--id", "ended")["jobs"])
    world.move(b, Phase.SUCCEEDED)
    assert run("sweep", "cancel", "ended").stdout == "cancellation is asked for of 2 of 3 jobs of ended\n"
    assert [kind for uid in (a, b, c) for kind, _ in world.intents(uid)] == ["cancel", "cancel"]
