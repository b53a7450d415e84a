"""Text sources: what they yield and in which order, what they say about bad text, and how samples are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from workers.data import corpus
from workers.data.corpus import Corpus, DataError
from workers.spec import DataSpec

pytestmark = pytest.mark.torch


def read(source: object, **fields: Any) -> list[str]:
    return list(corpus.documents(DataSpec(source=str(source), **fields)))


def lines(*values: object) -> str:
    return "\n".join(json.dumps(value) for value in values)


def test_builtin_topics() -> None:
    documents = read("builtin:topics")
    assert len(documents) > 50
    assert documents == read("builtin:topics")
    assert any("lambda" in document for document in documents)


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n\ntwo — drei\n")
    assert read(file) == ["one\n\ntwo — drei\n"]


def test_files_of_a_glob_come_by_path(tmp_path: Path) -> None:
    for name in ("b.txt", "c.txt", "a.txt", "d.md"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path / "*.txt") == ["a.txt", "b.txt", "c.txt"]


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "json"])
def test_json_lines(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"a.{ending}"
    file.write_text(lines({"text": "one"}, {"text": "two\nlines", "id": 3}) + "\n\n" + lines({"text": ""}))
    assert read(file) == ["one", "two\nlines", ""]


def test_the_field_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(lines({"body": "one", "text": "no"}))
    assert read(file, text_field="body") == ["one"]


def test_half_a_surrogate_pair_does_not_stop_training(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "ab\\ud83dcd"}\n')
    assert read(file) == ["ab?cd"]


def test_a_uri() -> None:
    with fsspec.open("memory://corpus-test/a.txt", "wt") as file:
        file.write("in memory")
    assert read("memory://corpus-test/a.txt") == ["in memory"]
    assert read("memory://corpus-test/*.txt") == ["in memory"]


BAD = {
    "no JSON": ("a.jsonl", b'{"text": "one"}\n{"text": \n', "a.jsonl:2 is not JSON: Expecting value"),
    "no field": (
        "a.jsonl",
        b'\n{"body": "one"}\n',
        "a.jsonl:2 has no text under 'text'; name the field by data.text_f",
    ),
    "no text": ("a.jsonl", b'{"text": 3}\n', "a.jsonl:1 has no text under 'text'"),
    "no object": ("a.jsonl", b'["text"]\n', "a.jsonl:1 has no text under 'text'"),
    "no UTF-8": ("a.txt", b"ab\xff", "a.txt is not UTF-8 text (byte 2: invalid start byte)"),
}


@pytest.mark.parametrize(("name", "data", "message"), BAD.values(), ids=BAD)
def test_bad_text(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.txt", "none.txt does not exist; data.source may be builtin:topics, a path or a URI"),
        ("*.none", "*.none matches no file; use builtin:topics, or a path or URI of text, JSON lines or Parquet"),
        ("folder", "folder is a folder; name its files, as in "),
    ],
)
def test_nothing_to_read(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError) as caught:
        read(tmp_path / source)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


def test_too_little_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("0123456")  # 8 tokens with the one that ends the document
    assert Corpus(DataSpec(source=str(file)), 7, 0).size == 1
    message = "a.txt has 8 tokens; one sample needs 9: use a smaller model.seq_len or more text"
    with pytest.raises(DataError, match=message):
        Corpus(DataSpec(source=str(file)), 8, 0)


def test_targets_are_the_tokens_that_follow(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(20, 120)))
    samples = Corpus(DataSpec(source=str(file)), 7, 0)
    assert samples.size == 14  # 101 tokens; the last sample needs one more than it trains
    tokens, targets = samples.batch(0, 14)
    assert tokens.shape == targets.shape == (14, 7)
    assert (targets == tokens + 1).all()
    assert sorted(tokens[:, 0].tolist()) == list(range(20, 118, 7))  # each sample once


def test_replicas_share_one_order(tmp_path: Path) -> None:
    samples = Corpus(DataSpec(), 16, 5)
    whole, _ = samples.batch(24, 12)
    for dp in (2, 3, 4):
        parts = [samples.batch(24 + rank * 12 // dp, 12 // dp)[0] for rank in range(dp)]
        assert [row for part in parts for row in part.tolist()] == whole.tolist()
