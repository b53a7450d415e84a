"""A run that stops and goes on, in any layout, is the run that never stopped; what breaks is said once and survived."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pool import Pool
from tests.workers import runs
from workers.checkpoint import logical, manifest
from workers.checkpoint.publisher import Publisher, newest_attempt
from workers.checkpoint.storage import Storage
from workers.reports import CheckpointRefused, Finished, Moved, Report, Resumed, SaveFailed, ShardSaved, StepDone
from workers.spec import RunSpec

pytestmark = pytest.mark.torch

EIGHT = {"dp": 2, "pp": 2, "tp": 2}
TIGHT = {"rtol": 0, "atol": 1e-9}
Said = list[list[Report]]  # of each rank


def run_of(layout: dict[str, int], steps: int = 6) -> RunSpec:
    train = {"steps": steps, "horizon": 8, "warmup_steps": 2}
    return runs.spec(layout=layout, train=train, checkpoint={"every_steps": 3})


def train(
    pool: Pool, root: Path, run: RunSpec, attempt: int, resume: tuple[str, ...] = ()
) -> tuple[Said, dict[int, str]]:
    """Reports by rank, and the manifests of the checkpoints that were published, by step."""
    said = pool.run(run.parallel.world, runs.train, str(root), run, attempt, resume)
    publisher = Publisher(job_storage(root), "run", attempt, "test", run)
    saved = heard(said, ShardSaved)
    steps = sorted({record.step for record in saved})
    return said, {step: publisher.publish(step, [r for r in saved if r.step == step]) for step in steps}


def job_storage(root: Path) -> Storage:
    return Storage.open(str(root)).child("run")


def heard(said: Said, kind: type[Any]) -> list[Any]:
    return [report for rank in said for report in rank if isinstance(report, kind)]


def losses(said: Said) -> dict[int, float]:
    return {report.step: report.loss for report in heard(said, StepDone)}


def state(root: Path, path: str) -> dict[str, np.ndarray]:
    """The whole training state in a checkpoint."""
    document = manifest.load(job_storage(root), path)
    tensors = {name: torch.zeros(kept.shape, dtype=torch.float64) for name, kept in document.tensors.items()}
    logical.load(tensors, document, job_storage(root))
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], **tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], **(tolerance or TIGHT), err_msg=name)


@dataclasses.dataclass(frozen=True)
class Whole:
    """Six steps in eight ranks that nothing interrupted."""

    root: Path
    said: Said
    manifests: dict[int, str]

    @property
    def losses(self) -> dict[int, float]:
        return losses(self.said)


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("whole")
    return Whole(root, *train(pool, root, run_of(EIGHT), 1))


@pytest.fixture
def copy(whole: Whole, tmp_path: Path) -> Path:
    """Its storage, to be changed."""
    return Path(shutil.copytree(whole.root, tmp_path / "copy"))


def test_what_is_said_of_a_run(whole: Whole) -> None:
    first, *others = whole.said
    assert [report for report in first if isinstance(report, Resumed)] == [Resumed(0, None)]
    steps = [report for report in first if isinstance(report, StepDone)]
    assert [(report.step, report.samples, report.tokens) for report in steps] == [
        (step, 12 * step, 12 * 16) for step in range(1, 7)
    ]
    assert [round(report.learning_rate / 1e-2, 3) for report in steps[:3]] == [0.5, 1.0, 0.933]
    assert heard(others, StepDone | Resumed) == []
    phases = [("start", -1), ("load", -1)]
    for step in range(1, 7):
        phases += [("step", step)] + [("save", step)] * (step % 3 == 0)
    for rank, reports in enumerate(whole.said):
        moves = [report for report in reports if isinstance(report, Moved)]
        assert {report.rank for report in moves} == {rank}
        assert [(report.phase, report.step) for report in moves] == [*phases, ("end", 6)]
        assert reports[-1] == Finished(rank, 6)
        assert [report.step for report in reports if isinstance(report, ShardSaved)] == [3, 6]


def test_the_manifest_says_what_was_consumed(whole: Whole) -> None:
    assert list(whole.manifests) == [3, 6]
    assert newest_attempt(job_storage(whole.root)) == 1
    for step, path in whole.manifests.items():
        document = manifest.verify(job_storage(whole.root), path)
        assert document.header["samples"] == 12 * step
        assert document.header["ledger"] == [{"attempt": 1, "start": 0, "end": 12 * step}]
        assert document.header["optimizer"] == {"name": "adamw", "steps": step}
        assert len(document.shards) == 8


@pytest.mark.parametrize(
    "layout", [{"pp": 2}, {"dp": 3}, {}, EIGHT], ids=["pp2", "dp3", "one process", "the same layout"]
)
def test_continuing_is_never_having_stopped(pool: Pool, whole: Whole, copy: Path, layout: dict[str, int]) -> None:
    said, manifests = train(pool, copy, run_of(layout), 2, (whole.manifests[3],))
    assert heard(said, Resumed) == [Resumed(3, whole.manifests[3])]
    assert heard(said, CheckpointRefused) == []
    wanted = {step: whole.losses[step] for step in (4, 5, 6)}
    final, uninterrupted = state(copy, manifests[6]), state(copy, whole.manifests[6])
    if layout == EIGHT:
        assert losses(said) == wanted
        assert_same(final, uninterrupted, rtol=0, atol=0)
    else:
        assert losses(said) == pytest.approx(wanted, rel=1e-9)
        assert_same(final, uninterrupted)
    ledger = manifest.load(job_storage(copy), manifests[6]).header["ledger"]
    assert [entry["attempt"] for entry in ledger] == [1, 2]
    consumed = Counter(sample for entry in ledger for sample in range(entry["start"], entry["end"]))
    assert consumed == Counter(range(72))


def flip_a_bit(storage: Storage, path: str) -> str:
    """In the first tensor of the last stage's last shard; the name of the file."""
    shard = manifest.load(storage, path).shards[-1]
    file = Path(storage.root) / shard.path
    data = bytearray(file.read_bytes())
    data[5] ^= 4
    file.write_bytes(data)
    return shard.path


def lose_a_shard(storage: Storage, path: str) -> str:
    shard = manifest.load(storage, path).shards[2]
    (Path(storage.root) / shard.path).unlink()
    return shard.path


def cut_an_index(storage: Storage, path: str) -> str:
    shard = manifest.load(storage, path).shards[0]
    file = Path(storage.root) / shard.index
    file.write_bytes(file.read_bytes()[:-9])
    return shard.index


def damage_the_manifest(storage: Storage, path: str) -> str:
    file = Path(storage.root) / path
    file.write_bytes(file.read_bytes().replace(b'"samples":72', b'"samples":84'))
    return "the manifest fails its digest"


@pytest.mark.parametrize("damage", [flip_a_bit, lose_a_shard, cut_an_index, damage_the_manifest])
def test_a_bad_checkpoint_is_walked_back_from(
    pool: Pool, whole: Whole, copy: Path, damage: Callable[[Storage, str], str]
) -> None:
    newest, older = whole.manifests[6], whole.manifests[3]
    evidence = damage(job_storage(copy), newest)
    said, _ = train(pool, copy, run_of({"pp": 2}), 2, (newest, older))
    (refused,) = heard(said, CheckpointRefused)
    assert refused in said[0]
    assert refused.manifest == newest
    assert evidence in refused.reason
    assert heard(said, Resumed) == [Resumed(3, older)]
    assert losses(said) == pytest.approx({step: whole.losses[step] for step in (4, 5, 6)}, rel=1e-9)


def test_without_a_good_checkpoint_the_seed_is_left(pool: Pool, whole: Whole, copy: Path) -> None:
    storage, resume = job_storage(copy), (whole.manifests[6], whole.manifests[3], "manifests/0000000001-000001.json")
    flip_a_bit(storage, resume[0])
    flip_a_bit(storage, resume[1])
    said, _ = train(pool, copy, run_of({}), 2, resume)
    refused = heard(said, CheckpointRefused)
    assert [report.manifest for report in refused] == list(resume)
    assert refused[-1].reason == "rank 0: missing"
    assert heard(said, Resumed) == [Resumed(0, None)]
    assert losses(said) == pytest.approx(whole.losses, rel=1e-9)  # nothing of the bad ones is left


def test_more_steps_go_on_where_the_run_ended(pool: Pool, whole: Whole, copy: Path, tmp_path: Path) -> None:
    alone, published = train(pool, tmp_path / "alone", run_of({}, steps=8), 1)
    assert {step: losses(alone)[step] for step in range(1, 7)} == pytest.approx(whole.losses, rel=1e-9)
    said, manifests = train(pool, copy, run_of({"tp": 2}, steps=8), 2, (whole.manifests[6],))
    assert losses(said) == pytest.approx({step: losses(alone)[step] for step in (7, 8)}, rel=1e-9)
    assert_same(state(copy, manifests[8]), state(tmp_path / "alone", published[8]))


def test_a_run_that_is_done_does_nothing(pool: Pool, whole: Whole, copy: Path) -> None:
    said, manifests = train(pool, copy, run_of({}), 2, (whole.manifests[6],))
    assert heard(said, StepDone) == []
    assert manifests == {}
    assert heard(said, Finished) == [Finished(0, 6)]


def test_a_save_that_fails_stops_no_training(pool: Pool, whole: Whole, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the job's folder should be")
    said, manifests = train(pool, tmp_path, run_of({"dp": 2}), 1)
    assert manifests == {}
    failed = heard(said, SaveFailed)
    assert sorted((report.rank, report.step) for report in failed) == [(0, 3), (0, 6), (1, 3), (1, 6)]
    assert all(str(tmp_path / "run") in report.reason for report in failed)
    assert losses(said) == pytest.approx(whole.losses, rel=1e-9)
    assert heard(said, Finished) == [Finished(0, 6), Finished(1, 6)]


@pytest.mark.parametrize(
    ("fields", "model", "step"),
    [({"learning_rate": 1e30}, {}, 2), ({}, {"init_std": 1e20}, 1)],
    ids=["a rate too high", "weights too large"],
)
def test_all_ranks_see_in_the_same_step_that_numbers_ran_out(
    pool: Pool, tmp_path: Path, fields: dict[str, Any], model: dict[str, Any], step: int
) -> None:
    run = runs.spec(layout=EIGHT, train={"precision": "fp32"} | fields, model=model)
    raised = pool.run(8, runs.non_finite, str(tmp_path), run)
    assert len(set(raised)) == 1
    assert re.fullmatch(
        rf"loss \S+, gradient norm (nan|inf) at step {step}: first in .* of stage . on rank .*", raised[0]
    )
