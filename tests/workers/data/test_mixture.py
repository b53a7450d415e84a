"""The order of a mixture: exact by weight, a pure function of the sample's number, a cursor for each source."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.data import mixture
from workers.data.mixture import PERIOD, Mixture

WEIGHTS = st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=12)


@given(WEIGHTS)
def test_a_period_has_as_many_of_each_as_its_weight_says(weights: list[float]) -> None:
    found = mixture.counts(weights)
    assert found.sum() == PERIOD
    assert found.min() >= 1
    shares = np.array(weights) / sum(weights) * PERIOD
    assert np.abs(found - np.maximum(shares, 1)).max() <= len(weights)


@given(WEIGHTS, st.integers(0, 10**12), st.integers(1, 300))
def test_each_source_is_counted_without_a_gap(weights: list[float], cursor: int, count: int) -> None:
    mixed = Mixture(weights, 7)
    which, positions = mixed.take(cursor, count)
    before, after = mixed.cursors(cursor), mixed.cursors(cursor + count)
    for source, (first, last) in enumerate(zip(before, after, strict=True)):
        assert positions[which == source].tolist() == list(range(first, last))
    assert sum(after) == cursor + count


@given(st.integers(0, 3 * PERIOD), st.integers(1, 400), st.integers(1, 5))
def test_any_cut_of_the_order_is_the_order(cursor: int, count: int, parts: int) -> None:
    mixed = Mixture([1, 2, 3.5], 1)
    whole = np.stack(mixed.take(cursor, count))
    cuts = np.linspace(0, count, parts + 1).astype(int)
    pieces = [np.stack(mixed.take(cursor + a, b - a)) for a, b in itertools.pairwise(cuts)]
    assert np.array_equal(np.concatenate(pieces, axis=1), whole)
    assert np.array_equal(np.stack(Mixture([1, 2, 3.5], 1).take(cursor, count)), whole)


def test_sources_are_spread_over_a_period() -> None:
    which, _ = Mixture([1, 1], 3).take(0, PERIOD)
    runs = np.diff(np.flatnonzero(np.diff(which)))
    assert runs.max() < 30
    assert not np.array_equal(which, Mixture([1, 1], 4).take(0, PERIOD)[0])


def test_nothing_is_taken_of_nothing() -> None:
    which, positions = Mixture([1, 1], 3).take(5, 0)
    assert which.shape == positions.shape == (0,)


@pytest.mark.torch
def test_a_corpus_of_several_sources(tmp_path: Path) -> None:
    from workers.data.corpus import Corpus
    from workers.spec import DataSpec

    for name, letter in (("a", "a"), ("b", "b")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": letter * 400}))
    sources: list[dict[str, Any]] = [
        {"source": f"{tmp_path}/a.jsonl", "weight": 3}, {"source": f"{tmp_path}/b.jsonl"},
    ]  # fmt: skip
    made = Corpus(DataSpec.model_validate({"sources": sources}), 8, 5)
    inputs, _ = made.batch(0, PERIOD)
    share = float((inputs[:, 0] == ord("a")).double().mean())
    assert share == pytest.approx(0.75, abs=0.01)  # but for the separators
    again, _ = made.batch(1000, 24)
    assert again.equal(inputs[1000:1024])


@pytest.mark.torch
def test_sources_of_different_tokenizers_do_not_mix(tmp_path: Path) -> None:
    from workers.data import prepare, prepared
    from workers.data.corpus import Corpus, DataError
    from workers.spec import DataSpec

    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * 400}))
    made = prepare.prepare(f"{tmp_path}/a.jsonl", str(tmp_path / "made"))
    other = made.model_copy(update={"tokenizer": made.tokenizer.model_copy(update={"size": 300, "name": "t.json"})})
    prepared.write(str(tmp_path / "made"), other)
    sources = [{"source": f"{tmp_path}/a.jsonl"}, {"source": str(tmp_path / "made")}]
    with pytest.raises(DataError, match=r"has 300 ids and .* 257"):
        Corpus(DataSpec.model_validate({"sources": sources}), 8, 5)
    with pytest.raises(DataError, match=r"was prepared with tokenizer t.json, not u.json"):
        Corpus(DataSpec(source=str(tmp_path / "made"), tokenizer="u.json"), 8, 5)


@pytest.mark.torch
def test_prepared_text_trains_as_the_text_does(tmp_path: Path) -> None:
    from workers.data import prepare
    from workers.data.corpus import Corpus
    from workers.spec import DataSpec

    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"{n} " * n}) for n in range(40)))
    prepare.prepare(f"{tmp_path}/a.jsonl", str(tmp_path / "made"), shard_tokens=500)
    plain = Corpus(DataSpec(source=f"{tmp_path}/a.jsonl"), 16, 3)
    made = Corpus(DataSpec(source=str(tmp_path / "made")), 16, 3)
    assert (plain.size, plain.vocabulary) == (made.size, made.vocabulary)
    for one, other in zip(plain.batch(90, 60), made.batch(90, 60), strict=True):
        assert one.equal(other)
