"""A run that begins with weights from Hugging Face: the same loss as there in any layout, and every misfit is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.workers import runs
from tests.workers.models import hub
from workers.data.corpus import Corpus
from workers.models import huggingface
from workers.reports import Resumed, StepDone

pytestmark = pytest.mark.torch

TRAIN = {"steps": 2, "global_batch": 4, "precision": "fp32", "learning_rate": 0.01}


def run_of(folder: Path, layout: dict[str, int], **model: Any) -> Any:
    spec, _ = huggingface.read(str(folder))
    return runs.spec(model=spec.model_dump() | model, train=TRAIN, layout=layout)


def begun(pool: Pool, root: Path, run: Any, folder: Path) -> tuple[str, list[float]]:
    """What rank 0 said it began with, and its losses."""
    said = pool.run(run.parallel.world, runs.train_from, str(root), run, str(folder))[0]
    (resumed,) = (report for report in said if isinstance(report, Resumed))
    assert (resumed.step, resumed.manifest) == (0, None)
    return str(resumed.weights), [report.loss for report in said if isinstance(report, StepDone)]


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("llama", [{}, {"tp": 2, "pp": 2, "dp": 2}, {"dp": 3, "zero": 3}]),
        ("llama, tied", [{"tp": 4, "pp": 2}]),
        ("qwen3", [{"pp": 2, "tp": 2}]),
        ("mixtral", [{"dp": 2, "ep": 2, "tp": 2}]),
    ],
)
def test_the_first_loss_is_that_of_the_folders_model(
    pool: Pool, tmp_path: Path, family: str, layouts: list[dict[str, int]]
) -> None:
    folder = hub.save(tmp_path / "hub", **hub.MODELS[family])
    run = run_of(folder, {})
    tokens, targets = Corpus(run.data, run.model.seq_len, run.train.seed).batch(0, 4)
    expected = torch.nn.functional.cross_entropy(hub.logits(folder, tokens).flatten(0, 1), targets.flatten()).item()
    _, weights = huggingface.read(str(folder))
    count = sum(torch.Size(weight.shape).numel() for weight in weights.values())
    for number, layout in enumerate(layouts):
        told, losses = begun(pool, tmp_path / str(number), run_of(folder, layout), folder)
        assert losses[0] == pytest.approx(expected, rel=1e-5)
        assert losses[1] != losses[0]
        assert told == f"{folder}: {len(weights)} tensors, {count:,} parameters"


def test_of_a_larger_vocabulary_the_new_rows_are_the_seeds_and_are_named(pool: Pool, tmp_path: Path) -> None:
    folder = hub.save(tmp_path / "hub", **hub.MODELS["llama"])
    rows = huggingface.read(str(folder))[0].vocab_size or 0
    losses = []
    for number, layout in enumerate([{}, {"tp": 2, "pp": 2}]):
        run = run_of(folder, layout, vocab_size=rows + 7)
        told, found = begun(pool, tmp_path / str(number), run, folder)
        named = f"rows {rows} to {rows + 6} of"
        assert told.endswith(f"; from the seed: {named} embedding.weight, {named} head.weight")
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"hidden": 64, "heads": 8}, "hidden is 32 there, not 64"),
        ({"rope_theta": 500_000.0}, "rope_theta is"),
        ({"vocab_size": 300}, "the vocabulary has 310 rows there, and 300 here: set model.vocab_size"),
    ],
)
def test_another_model_is_refused_by_all_ranks(pool: Pool, tmp_path: Path, model: dict[str, Any], says: str) -> None:
    folder = hub.save(tmp_path / "hub", **hub.MODELS["llama"], vocab_size=310)
    for told in pool.run(2, runs.refused_from, str(tmp_path), run_of(folder, {"dp": 2}, **model), str(folder)):
        assert told.startswith(f"init_from: {folder}: ")
        assert says in told


def test_a_file_that_is_not_whole_is_refused(pool: Pool, tmp_path: Path) -> None:
    folder = hub.save(tmp_path / "hub", **hub.MODELS["llama"])
    run = run_of(folder, {"dp": 2})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for told in pool.run(2, runs.refused_from, str(tmp_path), run, str(folder)):
        assert told.startswith("init_from: ")
