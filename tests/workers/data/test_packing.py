"""Documents in samples: each whole, once, in order; long ones in pieces; nothing learned of what fills."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.data.packing import Packing
from workers.data.run import Held
from workers.models.seams import IGNORED

pytestmark = pytest.mark.torch

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60)


def held(lengths: list[int]) -> Held:
    """Every token is another number."""
    ends = np.cumsum(lengths)
    return Held([np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)])


@given(LENGTHS, st.integers(1, 16))
def test_every_token_is_learned_once_after_those_before_it_in_its_document(lengths: list[int], seq_len: int) -> None:
    run = held(lengths)
    packing = Packing(run.lengths(), seq_len)
    inputs, targets, starts = packing.rows(run, np.arange(packing.size))
    learned = targets != IGNORED
    assert (targets[learned] == inputs[learned] + 1).all()
    begins = np.cumsum(lengths) - lengths
    ends = begins + lengths
    wanted = [token for begin, end in zip(begins, ends, strict=True) for token in range(begin + 1, end)]
    assert targets[learned].tolist() == wanted
    assert 0 <= packing.filled <= 1
    at = np.tile(np.arange(seq_len), (packing.size, 1))
    first = np.take_along_axis(inputs, starts, 1)
    assert (inputs[learned] - first[learned] == (at - starts)[learned]).all()  # one run from where it begins
    assert (starts[~learned] == at[~learned]).all()  # what fills is alone


def test_as_many_as_fit_stand_side_by_side() -> None:
    run = held([3, 4, 6, 2, 9])
    packing = Packing(run.lengths(), 5)
    _, targets, starts = packing.rows(run, np.arange(packing.size))
    assert starts.tolist() == [[0, 0, 2, 2, 2], [0, 0, 0, 0, 0], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0], [0, 0, 0, 3, 4]]
    assert (targets == IGNORED).sum(1).tolist() == [0, 0, 4, 0, 2]
    assert packing.filled == 19 / 25


def test_documents_of_one_token_have_nothing_to_learn() -> None:
    assert Packing(np.array([1, 0, 1]), 4).size == 0


def test_a_corpus_packs_prepared_text_as_it_packs_text(tmp_path: Path) -> None:
    from workers.data import prepare
    from workers.data.corpus import Corpus
    from workers.spec import DataSpec

    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"{n} " * (n % 17)}) for n in range(60)))
    prepare.prepare(f"{tmp_path}/a.jsonl", str(tmp_path / "made"), shard_tokens=300)
    plain = Corpus(DataSpec(source=f"{tmp_path}/a.jsonl", packing="documents"), 16, 3)
    made = Corpus(DataSpec(source=str(tmp_path / "made"), packing="documents"), 16, 3)
    cut = Corpus(DataSpec(source=str(tmp_path / "made")), 16, 3)
    assert plain.size == made.size != cut.size
    for one, other in zip(plain.batch(20, 30), made.batch(20, 30), strict=True):
        assert one.equal(other)
    starts = plain.starts(20, 30)
    assert starts is not None
    assert starts.equal(made.starts(20, 30))
    assert cut.starts(20, 30) is None
