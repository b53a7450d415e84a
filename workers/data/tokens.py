"""Tokenizers: bytes, built in, or a `tokenizer.json` of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import fsspec
import numpy as np

from workers.spec import BYTE_VOCABULARY


class Tokenizer(Protocol):
    size: int

    def encode(self, document: str) -> np.ndarray:
        """Ids of one document and the separator that ends it, int32 [tokens]."""

    def decode(self, ids: Sequence[int]) -> str:
        """For people: separators are left out, and what is no text is replaced."""

    def placed(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a text as it stands, int32 [tokens], and the character at which each begins, int64 [tokens]."""


class Bytes:
    """UTF-8 bytes; 256 ends a document."""

    size = BYTE_VOCABULARY

    def encode(self, document: str) -> np.ndarray:
        return np.append(np.frombuffer(document.encode(), dtype=np.uint8).astype(np.int32), np.int32(256))

    def placed(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        sizes = [len(character.encode()) for character in text]
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32), np.repeat(np.arange(len(text)), sizes)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(one for one in ids if one < 256).decode(errors="replace")


class File:
    """A `tokenizer.json`. A document ends with its end-of-text token, or, without one, with the last id."""

    def __init__(self, uri: str) -> None:
        from tokenizers import Tokenizer as Fast

        with fsspec.open(uri, "rt", encoding="utf-8") as file:
            text = file.read()
        try:
            self.fast = Fast.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"{uri} is no tokenizer.json: {error}; use `byte` or one that `tokenizers` saved"
            ) from None
        self.size = max(self.fast.get_vocab().values(), default=-1) + 1  # ids may leave gaps
        ends = (self.fast.token_to_id(text) for text in ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[SEP]"))
        self.end = next((end for end in ends if end is not None), self.size - 1)

    def encode(self, document: str) -> np.ndarray:
        return np.array([*self.fast.encode(document, add_special_tokens=False).ids, self.end], dtype=np.int32)

    def placed(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        found = self.fast.encode(text, add_special_tokens=False)
        return np.array(found.ids, dtype=np.int32), np.array([first for first, _ in found.offsets], dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.fast.decode([one for one in ids if one != self.end]))


def tokenizer(name: str) -> Tokenizer:
    return Bytes() if name == "byte" else File(name)
