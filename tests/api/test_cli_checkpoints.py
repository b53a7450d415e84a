"""`phalanx checkpoint` against a live API, with a hand that answers as a controller would."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli import checkpoints
from api.cli.main import app
from service.contracts import errors
from service.contracts.job import Phase
from service.store.records import CheckpointRow
from tests.api.world import World, until
from workers.checkpoint import manifest

Run = Callable[..., Any]


@pytest.fixture
def run(world: World) -> Run:
    def invoke(*words: str) -> Any:
        return CliRunner().invoke(
            app, ["checkpoint", *words], env={"PHALANX_HOME": str(world.home)}, terminal_width=100
        )

    return invoke


@pytest.fixture
def uid(world: World) -> str:
    """A running job with good checkpoints of steps 5 and 10, one rejected and one removed."""
    made = world.submit().uid
    world.checkpoint(made, 5)
    world.checkpoint(made, 10)
    world.checkpoint(made, 15, rejected="block 3 [torn]")
    world.commit(checkpoints=[CheckpointRow(made, 1, 1, manifest.path(1, 1), 1.0)])
    world.move(made, Phase.RUNNING)
    return made


def answering(world: World, uid: str, kind: str, reason: str, times: int = 1, **more: str) -> threading.Thread:
    """Answers intents with events of this type, as they come."""

    def answer() -> None:
        for _ in range(times):
            intent = until(lambda: next((one for one in world.store.intents() if one.job == uid), None))
            data = {"manifest": intent.data["manifest"], **more}
            world.commit(events=[(uid, 1.0, kind, reason, data)], intents_done=[intent.id])

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_ls(run: Run, uid: str) -> None:
    lines = run("ls", uid).stdout.splitlines()
    assert lines[0].split() == ["STEP", "ATTEMPT", "PUBLISHED", "BYTES", "STATE"]
    assert [line.split()[0] for line in lines[1:]] == ["15", "10", "5"]
    assert lines[1].endswith("rejected: block 3 [torn]")
    assert lines[2].rstrip().endswith("80     published")
    assert run("ls", uid, "--all").stdout.splitlines()[-1].rstrip().endswith("removed")
    assert [json.loads(line)["step"] for line in run("ls", uid, "--json").stdout.splitlines()] == [15, 10, 5]


def test_show(run: Run, uid: str) -> None:
    shown = run("show", uid)
    assert shown.exit_code == 0
    for said in (f"step 10 of {uid}", "dp 1", "layers 4", "2 of 32 elements; 16 parameters", "80 bytes in 1 shards",
                 "attempt 1, start 0, end 80", "name adamw, steps 10"):  # fmt: skip
        assert said in " ".join(shown.stdout.split()), said
    assert json.loads(run("show", uid, "5", "--json").stdout)["samples"] == 40
    assert "rejected: block 3 [torn]" in run("show", uid, "15").stdout


@pytest.mark.parametrize(
    ("kind", "code", "stream"),
    [("CheckpointVerified", 0, "stdout"), ("CheckpointRejected", 1, "stdout"), ("CheckpointCheckFailed", 3, "stderr")],
)
def test_verify_waits_for_the_verdict(run: Run, world: World, uid: str, kind: str, code: int, stream: str) -> None:
    thread = answering(world, uid, kind, "that is how it is")
    done = run("verify", uid)
    thread.join()
    assert (done.exit_code, "that is how it is" in getattr(done, stream)) == (code, True)


def test_verify_all_takes_every_good_one(run: Run, world: World, uid: str) -> None:
    thread = answering(world, uid, "CheckpointVerified", "well", times=2)
    done = run("verify", uid, "--all")
    thread.join()
    assert (done.exit_code, done.stdout) == (0, "well\nwell\n")
    assert run("verify", uid, "5", "--all").exit_code == 2


def test_nothing_is_waited_for_where_that_is_not_wanted(run: Run, world: World, uid: str) -> None:
    assert "asked for" in run("verify", uid, "5", "--no-wait").stdout
    assert "asked for" in run("export", uid, "--to", f"{world.root}/out", "--no-wait").stdout
    assert [kind for kind, _ in world.intents(uid)] == ["verify", "export"]
    assert world.intents(uid)[1][1]["step"] == 10


def test_restore(run: Run, world: World, uid: str) -> None:
    assert f"{uid} goes back to the checkpoint of step 5" in run("restore", uid, "5").stdout
    assert [kind for kind, _ in world.intents(uid)] == ["restore"]
    world.move(uid, Phase.SUCCEEDED)
    done = run("restore", uid, "5")
    assert (done.exit_code, f"phalanx checkpoint fork {uid}" in done.stderr) == (2, True)


def test_evaluate(run: Run, world: World, uid: str) -> None:
    done = run("evaluate", uid, "5", "--data", "topics=builtin:topics", "--batches", "3")
    assert done.exit_code == 0, done.stderr
    made = done.stdout.split()[1].strip(",")
    spec = world.store.job(made).spec
    assert done.stdout == f"submitted {made}, which evaluates step 5 of {uid}\n"
    asked = {"source": "builtin:topics", "name": "topics", "text_field": "text"}
    assert (spec["eval"]["data"], spec["eval"]["batches"], spec["eval"]["only"]) == ([asked], 3, True)
    assert run("evaluate", uid).exit_code == 2


def test_evaluate_a_job_that_is_judged_by_a_source_of_its_own(run: Run, world: World) -> None:
    own = {"data": [{"source": "builtin:topics", "name": "mine"}], "metric": "mine", "patience": 3}
    uid = world.submit({"eval": own}).uid
    world.checkpoint(uid, 5)
    done = run("evaluate", uid, "--data", "other=builtin:topics")
    assert done.exit_code == 0, done.stderr
    found = world.store.job(done.stdout.split()[1].strip(",")).spec["eval"]
    assert (found["metric"], [one["name"] for one in found["data"]]) == ("loss", ["other"])


def test_fork(run: Run, world: World, uid: str) -> None:
    done = run("fork", uid, "5", "--name", "other", "--set", "train.steps=50", "--set", "checkpoint.keep=7")
    assert done.exit_code == 0
    made = done.stdout.split()[1].rstrip(",")
    spec = world.store.job(made).spec
    assert (spec["name"], spec["train"]["steps"], spec["checkpoint"]["keep"]) == ("other", 50, 7)
    assert done.stdout == f"submitted {made}, which begins at step 5 of {uid}\n"
    assert run("fork", uid, "--key", "k").stdout == run("fork", uid, "--key", "k").stdout


@pytest.mark.parametrize(("kind", "code"), [("CheckpointExported", 0), ("CheckpointExportFailed", 1)])
def test_export_waits(run: Run, world: World, uid: str, kind: str, code: int) -> None:
    to = f"{world.root}/out"
    thread = answering(world, uid, kind, "that is how it is", to=to)
    done = run("export", uid, "5", "--to", to, "--dtype", "bfloat16")
    thread.join()
    assert (done.exit_code, done.stdout) == (code, "that is how it is\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["restore", "UID", "7"], "no checkpoint of step 7"),
        (["restore", "UID", "15"], "never used again: block 3 [torn]"),
        (["restore", "UID"], "Missing argument"),
        (["restore", "UID", "ten"], "Invalid value for 'STEP'"),
        (["verify", "UID", "--", "-1"], "Invalid value for 'STEP'"),
        (["show", "UID", "99999999999999999999"], "pattern"),
        (["export", "UID"], "--to names the folder"),
        (["export", "UID", "--to", "/etc/out"], "not under a storage root"),
        (["fork", "UID", "--set", "nonsense"], "--set nonsense is no change"),
        (["fork", "UID", "--set", "train.stepz=3"], "unknown field 'stepz' in train"),
        (["fork", "UID", "--set", "train.steps=[1"], "can't be read as YAML"),
        (["fork", "UID", "--set", "train.steps=2026-01-01"], "can't be JSON"),
    ],
)
def test_what_can_not_be_done_is_told(run: Run, uid: str, words: list[str], says: str) -> None:
    done = run(*(uid if word == "UID" else word for word in words))
    assert (done.exit_code, says in " ".join(done.stderr.split())) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("changes", "made"),
    [
        ([], {}),
        (["a=1", "b.c=x", "b.d=[1, 2]"], {"a": 1, "b": {"c": "x", "d": [1, 2]}}),
        (["a=null", "b="], {"a": None, "b": None}),
        (["a=x=y"], {"a": "x=y"}),
        (["a=1", "a=2"], {"a": 2}),
        (["a=auto", "a.b=1"], None),
        (["=1"], None),
        (["a..b=1"], None),
    ],
)
def test_changes_in_words(changes: list[str], made: dict[str, Any] | None) -> None:
    if made is None:
        with pytest.raises(errors.UserError, match="--set"):
            checkpoints.overrides(changes)
    else:
        assert checkpoints.overrides(changes) == made
