"""`python -m workers`, alone and under torchrun: JSON lines, published checkpoints, and refusals that can be read."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from workers import __main__ as program
from workers.checkpoint import manifest
from workers.checkpoint.storage import Storage
from workers.reports import CheckpointRefused, Moved, Report, SaveFailed, ShardSaved
from workers.spec import Assignment, RunSpec

pytestmark = pytest.mark.torch

JOB = {
    "name": "tiny",
    "model": {"layers": 4, "hidden": 32, "heads": 8, "kv_heads": 2, "ffn_hidden": 48, "seq_len": 16},
    "data": {"source": "builtin:topics"},
    "train": {"steps": 2, "horizon": 6, "global_batch": 12, "learning_rate": 1e-2, "precision": "float64", "seed": 5},
    "resources": {"device": "cpu", "slots": 1},
    "checkpoint": {"every_steps": 2},
}


def job_file(folder: Path, **changes: Any) -> Path:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(JOB | changes))
    return file


def run(*command: str, timeout_s: float = 90.0) -> list[dict[str, Any]]:
    """The JSON lines of `python -m COMMAND`, which must end well within the time."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors
    return [json.loads(line) for line in out.splitlines()]


def torchrun(ranks: int) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return ["torch.distributed.run", "--nproc-per-node", str(ranks), *where, "-m"]


def train_for(steps: int) -> dict[str, Any]:
    return JOB["train"] | {"steps": steps}


def of_kind(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["report"] == kind]


def test_one_process_then_four_then_one_again(tmp_path: Path) -> None:
    root = str(tmp_path / "runs")
    alone = run("workers", str(job_file(tmp_path)), "--root", root)
    assert [line["report"] for line in alone] == ["Resumed", "StepDone", "StepDone", "CheckpointPublished", "Finished"]
    assert alone[0] == {"report": "Resumed", "step": 0, "manifest": None, "weights": None}
    assert of_kind(alone, "CheckpointPublished")[0]["manifest"] == manifest.path(2, 1)

    four = job_file(tmp_path, train=train_for(4), parallel={"dp": 2, "pp": 2})
    together = run(*torchrun(4), "workers", str(four), "--root", root)
    assert together[0] == {"report": "Resumed", "step": 2, "manifest": manifest.path(2, 1), "weights": None}
    assert [line["step"] for line in of_kind(together, "StepDone")] == [3, 4]
    assert of_kind(together, "CheckpointPublished") == [
        {"report": "CheckpointPublished", "step": 4, "manifest": manifest.path(4, 2)}
    ]
    assert len(of_kind(together, "Finished")) == 1

    again = run("workers", str(job_file(tmp_path, train=train_for(6))), "--root", root)
    whole = run("workers", str(job_file(tmp_path, train=train_for(6))), "--root", root, "--job", "whole")
    stitched = [line["loss"] for lines in (alone, together, again) for line in of_kind(lines, "StepDone")]
    assert stitched == pytest.approx([line["loss"] for line in of_kind(whole, "StepDone")], rel=1e-9)

    storage = Storage.open(root).child("run")
    assert manifest.published(storage) == [manifest.path(6, 3), manifest.path(4, 2), manifest.path(2, 1)]
    assert manifest.verify(storage, manifest.path(6, 3)).header["ledger"] == [
        {"attempt": 1, "start": 0, "end": 24},
        {"attempt": 2, "start": 24, "end": 48},
        {"attempt": 3, "start": 48, "end": 72},
    ]


LAYOUTS = "Layouts that work on 5 slots: dp 5 x pp 1 x tp 1; "
REFUSALS = {
    "empty": ("", "a job is a mapping of fields, as `train: {steps: 100}`, not NoneType"),
    "a list": ("- 1", "a job is a mapping of fields, as `train: {steps: 100}`, not list"),
    "no YAML": ("model: [", "while parsing a flow node"),
    "a field is missing": (yaml.safe_dump({"data": {}, "train": {"steps": 1}}), "model: Field required"),
    "unknown fields": (
        yaml.safe_dump(JOB | {"modle": 1, "train": {"stesp": 1}}),
        "train.steps: Field required; train.stesp: Extra inputs are not permitted; modle: Extra inputs are not perm",
    ),
    "a layout that can't be": (
        yaml.safe_dump(JOB | {"parallel": {"tp": 5}}),
        f"tp 5 does not divide 8 heads. {LAYOUTS}",
    ),
    "too few ranks": (
        yaml.safe_dump(JOB | {"parallel": {"dp": 2, "pp": 2}}),
        "dp 2 x pp 2 x tp 1 needs 4 ranks, and 1 were started: use torchrun --nproc-per-node 4, or change parallel",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_job_that_can_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    for rank in ("0", "1"):  # the first rank says it, all end
        world = "1" if rank == "0" else "2"
        assert program.main([str(file), "--root", str(tmp_path)], {"RANK": rank, "WORLD_SIZE": world}) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"{file}: {message}")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("file", "root", "message"),
    [("none.yaml", "runs", "No such file or directory"), ("job.yaml", "nowhere://runs", "Protocol not known: nowhere")],
)
def test_places_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, root: str, message: str
) -> None:
    job_file(tmp_path)
    assert program.main([str(tmp_path / file), "--root", root], {}) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(1, {}), (4, {"dp": 4}), (5, {"dp": 5}), (13, "needs 12 ranks, and 13 were started")],
)
@pytest.mark.parametrize("written", [{}, {"parallel": "auto"}], ids=["left out", "auto"])
def test_a_layout_is_found(tmp_path: Path, written: dict[str, str], world: int, parallel: dict[str, int] | str) -> None:
    file = job_file(tmp_path, **written)
    if isinstance(parallel, str):
        with pytest.raises(ValueError, match=parallel):
            program._run(file, world)
    else:
        assert program._run(file, world).parallel.model_dump(exclude_defaults=True) == parallel


@pytest.fixture
def voices(tmp_path: Path) -> list[program.Voice]:
    """Of the two ranks of a run; storage is empty."""
    spec = RunSpec.from_job(JOB | {"parallel": {"dp": 2}})
    store = dist.HashStore()
    storage = Storage.open(str(tmp_path)).child("run")
    assignments = [Assignment("run", 1, "torchrun", rank, spec, str(tmp_path), "", 0) for rank in range(2)]
    return [program.Voice(assignment, storage, store) for assignment in assignments]


SAVED = ShardSaved(3, 0, "checkpoints/0000000003/1-torchrun/rank-00000.json", "0" * 32, 0, {}, 0.0)
FAILED = SaveFailed(3, 1, "OSError: no space")
OTHER_HEADER = ShardSaved(3, 1, "checkpoints/0000000003/1-torchrun/rank-00001.json", "0" * 32, 0, {"step": 4}, 0.0)
SAVES = {
    "one rank could not write": (FAILED, SAVED, {"rank": 1, "reason": "OSError: no space"}),
    "the first rank could not write": (
        ShardSaved(3, 1, "", "", 0, {}, 0.0),
        SaveFailed(3, 0, "OSError: no space"),
        {"rank": 0, "reason": "OSError: no space"},
    ),
    "the shards are gone": (
        ShardSaved(3, 1, SAVED.index, SAVED.index_digest, 0, {}, 0.0),
        SAVED,
        {"rank": 0, "reason": f"not published: {SAVED.index}: missing"},
    ),
    "ranks disagree": (
        OTHER_HEADER,
        SAVED,
        {"rank": 0, "reason": "not published: ranks disagree on the state beside the tensors at step 3"},
    ),
}


@pytest.mark.parametrize(("second", "first", "said"), SAVES.values(), ids=SAVES)
def test_a_save_that_fails_is_said_once(
    voices: list[program.Voice],
    capsys: pytest.CaptureFixture[str],
    second: Report,
    first: Report,
    said: dict[str, Any],
) -> None:
    voices[1](second)
    voices[0](first)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"report": "SaveFailed", "step": 3} | said


def test_the_first_rank_speaks(voices: list[program.Voice], capsys: pytest.CaptureFixture[str]) -> None:
    refused = CheckpointRefused("manifests/0000000003-000001.json", "rank 1: missing")
    voices[1](refused)
    voices[0](Moved(0, "step", 3, 0.0))
    assert capsys.readouterr().out == ""
    voices[0](refused)
    assert json.loads(capsys.readouterr().out)["reason"] == "rank 1: missing"
    assert voices[0].refused == {refused.manifest}  # what is no good is not counted among those kept
