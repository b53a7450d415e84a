"""Text sources: the standard library's documentation, and text or JSON lines at a path or fsspec URI."""

from __future__ import annotations

import json
from collections.abc import Iterator

import fsspec
import numpy as np
import torch
from fsspec.core import OpenFile

from workers.data import order, tokens
from workers.spec import DataSpec

JSON_LINES = (".jsonl", ".ndjson", ".json")


class DataError(ValueError):
    """The data can't be trained on as the spec says; the message says what would work."""


class Corpus:
    """Samples of `seq_len` tokens and the token after each, cut from one long run of tokens."""

    def __init__(self, data: DataSpec, seq_len: int, seed: int) -> None:
        using = tokens.tokenizer(data.tokenizer)
        self.vocabulary = using.size
        self.tokens = tokens.encode(documents(data), using)
        self.seq_len, self.seed = seq_len, seed
        self.size = (len(self.tokens) - 1) // seq_len
        if self.size < 1:
            raise DataError(
                f"{data.source} has {len(self.tokens)} tokens; one sample needs {seq_len + 1}: "
                "use a smaller model.seq_len or more text"
            )

    def batch(self, cursor: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 [count, seq_len], of the samples number `cursor` and on in the global order."""
        ids = order.samples(self.seed, cursor, count, self.size)
        rows = self.tokens[ids[:, None] * self.seq_len + np.arange(self.seq_len + 1)]
        whole = torch.from_numpy(rows.astype(np.int64))
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def documents(data: DataSpec) -> Iterator[str]:
    """Documents of a source in a fixed order. Raises DataError where there is nothing to read."""
    if data.source == "builtin:topics":
        from pydoc_data.topics import topics

        yield from (topics[name] for name in sorted(topics))
        return
    files = fsspec.open_files(data.source, "rt", encoding="utf-8")
    if not files:
        raise DataError(f"{data.source} matches no file; use builtin:topics, or a path or URI of text or JSON lines")
    for file in sorted(files, key=lambda opened: str(opened.path)):
        yield from _documents(file, data.text_field)


def _documents(file: OpenFile, field: str) -> Iterator[str]:
    try:
        with file as stream:
            if str(file.path).endswith(JSON_LINES):
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield _text(line, field, f"{file.path}:{number}")
            else:
                yield stream.read()
    except FileNotFoundError:
        raise DataError(f"{file.path} does not exist; data.source may be builtin:topics, a path or a URI") from None
    except IsADirectoryError:
        raise DataError(f"{file.path} is a folder; name its files, as in {file.path}/*.txt") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file.path} is not UTF-8 text (byte {error.start}: {error.reason})") from None


def _text(line: str, field: str, place: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place} is not JSON: {error.msg}; one JSON object a line is wanted") from None
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        raise DataError(f"{place} has no text under {field!r}; name the field by data.text_field")
    return str(value[field].encode("utf-8", "replace"), "utf-8")  # JSON may hold half a surrogate pair
