"""Evaluation while a run trains: by source, under every layout, and what follows from it for the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.pool import Pool
from tests.workers import runs
from workers.checkpoint import manifest
from workers.checkpoint.publisher import Publisher
from workers.checkpoint.storage import Storage
from workers.data.corpus import Corpus
from workers.models import registry
from workers.models.decoder import initialise
from workers.reports import Evaluated, Finished, Report, ShardSaved, StepDone
from workers.spec import RunSpec
from workers.validation import Validation

pytestmark = pytest.mark.torch

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp5": {"dp": 5},
    "dp2 x pp2 x tp2": {"dp": 2, "pp": 2, "tp": 2},
    "zero 3": {"dp": 4, "zero": 3},
}


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, str]]:
    """Of the second there are fewer samples than two global batches of 12."""
    (tmp_path / "prose.txt").write_text("It was a bright cold day. " * 100)
    (tmp_path / "sums.jsonl").write_text('{"text": "1 + 1 = 2, 2 + 2 = 4"}\n' * 11)
    return [{"source": str(tmp_path / "prose.txt")}, {"source": str(tmp_path / "sums.jsonl"), "name": "arithmetic"}]


def evaluations(said: list[list[Report]]) -> list[Evaluated]:
    return [report for report in said[0] if isinstance(report, Evaluated)]


def alone(run: RunSpec, corpus: Corpus, count: int) -> float:
    """Mean loss of the first `count` samples in the model that the seed makes."""
    model = registry.of(run.model)(run.model, corpus.vocabulary, dtype=torch.float64)
    initialise(model, run.model, run.train.seed)
    tokens, targets = corpus.batch(0, count)
    with torch.no_grad():
        return float(functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_source_is_measured_once_and_nothing_is_trained_or_saved(
    pool: Pool, tmp_path: Path, sources: list[dict[str, str]], layout: str
) -> None:
    run = runs.spec(layout=LAYOUTS[layout], eval={"data": sources, "batches": 2, "only": True})
    said = pool.run(run.parallel.world, runs.train, str(tmp_path / "root"), run, 1, ())
    assert run.eval is not None
    corpora = Validation(run, run.eval).corpora
    prose, arithmetic = corpora["prose"], corpora["arithmetic"]
    assert arithmetic.size < 24 < prose.size
    (told,) = evaluations(said)
    (one, first, first_tokens), (two, second, second_tokens) = told.sources
    assert (one, first_tokens, two, second_tokens) == ("prose", 24 * 16, "arithmetic", arithmetic.size * 16)
    assert first == pytest.approx(alone(run, prose, 24), rel=1e-12)
    assert second == pytest.approx(alone(run, arithmetic, arithmetic.size), rel=1e-12)
    assert told.tokens == first_tokens + second_tokens
    assert told.loss == pytest.approx((first * first_tokens + second * second_tokens) / told.tokens, rel=1e-12)
    assert [reports[-1] for reports in said] == [Finished(rank, 0) for rank in range(run.parallel.world)]
    assert not [one for one in said[0] if isinstance(one, StepDone | ShardSaved)]
    assert manifest.published(Storage.open(str(tmp_path / "root" / "run"))) == []


def test_after_the_last_step_it_is_evaluated_whatever_the_interval(
    pool: Pool, tmp_path: Path, sources: list[dict[str, str]]
) -> None:
    run = runs.spec(train={"steps": 5}, eval={"data": sources[:1], "every": 3})
    told = evaluations(pool.run(1, runs.train, str(tmp_path), run, 1, ()))
    assert [one.step for one in told] == [3, 5]
    assert [(one.best, one.worse) for one in told] == [((one.step, one.loss), 0) for one in told]


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "tp": 2}])
def test_the_best_is_saved_and_a_run_that_becomes_no_better_ends(
    pool: Pool, tmp_path: Path, sources: list[dict[str, str]], layout: dict[str, Any]
) -> None:
    asked = {"data": sources, "every": 2, "patience": 2, "min_delta": 50.0, "metric": "arithmetic"}
    run = runs.spec(layout=layout, train={"steps": 100}, eval=asked)
    said = pool.run(run.parallel.world, runs.train, str(tmp_path), run, 1, ())
    told = evaluations(said)
    best = (2, told[0].sources[1][1])
    assert [(one.step, one.best, one.worse) for one in told] == [(2, best, 0), (4, best, 1), (6, best, 2)]
    assert said[0][-1] == Finished(0, 6)
    assert [one.step for one in said[0] if isinstance(one, ShardSaved)] == [2, 6]  # the best, and the last


def test_an_early_end_holds_for_who_comes_back_to_it(pool: Pool, tmp_path: Path, sources: list[dict[str, str]]) -> None:
    asked = {"data": sources[:1], "every": 1, "patience": 1, "min_delta": 50.0}
    run = runs.spec(train={"steps": 100}, eval=asked)
    said = pool.run(1, runs.train, str(tmp_path), run, 1, ())
    assert said[0][-1] == Finished(0, 2)
    last = [one for one in said[0] if isinstance(one, ShardSaved) and one.step == 2]
    path = Publisher(Storage.open(str(tmp_path / "run")), "run", 1, "test", run).publish(2, last)
    again = pool.run(1, runs.train, str(tmp_path), run, 2, (path,))
    assert again[0][-1] == Finished(0, 2)
    assert not [one for one in again[0] if isinstance(one, StepDone | Evaluated)]
