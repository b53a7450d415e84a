"""Tokenizers: bytes, and files that the `tokenizers` library wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from workers.data import tokens

SENTENCES = ["the cat sat on the mat", "the dog sat on the cat", "a mat and a dog"]


def words(path: Path, special: list[str]) -> str:
    """A word-level tokenizer trained on a few sentences."""
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(SENTENCES, trainers.WordLevelTrainer(special_tokens=["<unk>", *special]))
    made.save(str(path))
    return str(path)


def test_bytes() -> None:
    using = tokens.tokenizer("byte")
    assert using.size == 257
    assert using.encode("aé").tolist() == [97, 0xC3, 0xA9, 256]
    assert using.encode("").tolist() == [256]


@pytest.mark.parametrize("end", ["</s>", "<|endoftext|>", "<eos>"])
def test_words_end_with_the_end_of_text(tmp_path: Path, end: str) -> None:
    using = tokens.tokenizer(words(tmp_path / "tokenizer.json", [end]))
    assert using.size == 2 + len({word for sentence in SENTENCES for word in sentence.split()})
    ids = using.encode("the cat flew").tolist()
    assert len(ids) == 4
    assert ids[2:] == [0, 1]  # unknown, end of text
    assert len({*ids}) == 4


def test_without_an_end_of_text_the_last_id_ends(tmp_path: Path) -> None:
    using = tokens.tokenizer(words(tmp_path / "tokenizer.json", []))
    assert using.encode("").tolist() == [using.size - 1]


def test_pairs_of_bytes_come_back_as_text(tmp_path: Path) -> None:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["</s>"])
    )
    made.save(str(tmp_path / "tokenizer.json"))
    using = tokens.tokenizer(str(tmp_path / "tokenizer.json"))
    ids = using.encode("the cat sät")
    assert ids[-1] == 0
    assert len(ids) < len("the cat sät".encode())  # "the" and "cat" are learned
    assert "".join(made.id_to_token(i) for i in ids[:-1]) == "theĠcatĠsÃ¤t"


def test_ids_may_leave_gaps(tmp_path: Path) -> None:
    file = Path(words(tmp_path / "tokenizer.json", ["</s>"]))
    value = json.loads(file.read_text())
    value["model"]["vocab"]["mat"] = 900
    file.write_text(json.dumps(value))
    using = tokens.tokenizer(str(file))
    assert using.encode("mat").tolist() == [900, 1]
    assert using.size == 901  # the embedding has a row for each id


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer\.json: .*; use `byte` or one that"):
        tokens.tokenizer(str(tmp_path / "tokenizer.json"))
