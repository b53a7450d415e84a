"""Token files as Megatron-LM's tools read and write them: `NAME.bin` has the ids, `NAME.idx` where documents are.

The index, little-endian: `MMIDIDX` and two zeros; u64 version 1; u8 code of the ids' type; u64 sequences; u64 entries
of the last table; i32 tokens of each sequence; i64 byte at which each begins; i64 sequence at which each document
begins, and the number of sequences. A document is one sequence here.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import BinaryIO

import numpy as np
import xxhash

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
HEAD = struct.Struct("<9sQBQQ")
SMALL = 65_500  # vocabularies up to here have ids of two bytes, as there


def dtype_of(vocabulary: int) -> np.dtype:
    """Of ids in [0, vocabulary)."""
    return np.dtype(np.uint16 if vocabulary < SMALL else np.int32)


class Writer:
    """Of one pair of files: ids go out as they come, the index is known at the end."""

    def __init__(self, out: BinaryIO, dtype: np.dtype) -> None:
        self.out, self.dtype = out, dtype
        self.lengths: list[int] = []
        self.tokens = 0
        self._digest = xxhash.xxh3_128()

    def add(self, ids: np.ndarray) -> None:
        """One document, [tokens]."""
        data = np.ascontiguousarray(ids, dtype=self.dtype).tobytes()
        self.out.write(data)
        self._digest.update(data)
        self.lengths.append(len(ids))
        self.tokens += len(ids)

    @property
    def digest(self) -> str:
        """xxh3-128 of what was written, hex."""
        return self._digest.hexdigest()

    def index(self) -> bytes:
        lengths = np.array(self.lengths, dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        begins = np.concatenate(([0], ends[:-1])).astype(np.int64) if len(ends) else ends
        documents = np.arange(len(lengths) + 1, dtype=np.int64)
        (code,) = (code for code, kind in CODES.items() if np.dtype(kind) == self.dtype)
        head = HEAD.pack(MAGIC, VERSION, code, len(lengths), len(documents))
        return head + lengths.tobytes() + begins.tobytes() + documents.tobytes()


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    dtype: np.dtype
    lengths: np.ndarray  # int32, tokens of each sequence
    begins: np.ndarray  # int64, bytes
    documents: np.ndarray  # int64, sequence at which each begins, and one more

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


def parse(data: bytes) -> Index:
    """ValueError: it is no such index, or not all of it."""
    if len(data) < HEAD.size:
        raise ValueError("it ends in its head")
    magic, version, code, sequences, documents = HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION or code not in CODES:
        raise ValueError("it does not begin as an index of tokens")
    if len(data) != HEAD.size + 12 * sequences + 8 * documents:
        raise ValueError(f"it has {len(data)} bytes, and {sequences} sequences need others")
    at = HEAD.size
    lengths = np.frombuffer(data, np.int32, sequences, at)
    begins = np.frombuffer(data, np.int64, sequences, at + 4 * sequences)
    return Index(np.dtype(CODES[code]), lengths, begins, np.frombuffer(data, np.int64, documents, at + 12 * sequences))
