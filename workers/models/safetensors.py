"""The safetensors file format (https://huggingface.co/docs/safetensors), on any storage and without torch.

A file is the header's length in 8 bytes, a JSON header {name: {dtype, shape, data_offsets}}, then raw bytes,
little-endian and row-major. Reading takes ranges of rows and writing streams: no file has to be local or fit in memory.
Knows nothing of models.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable

from workers.checkpoint.shards import ITEM_BYTES, Buffer
from workers.checkpoint.storage import Storage

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
METADATA = "__metadata__"


class BadFile(ValueError):
    """Not a whole safetensors file: its path, and why it is known."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} is no whole safetensors file: {why}")


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file."""

    storage: Storage
    path: str
    dtype: str
    shape: tuple[int, ...]
    at: int  # byte of the file

    def read(self, first: int, count: int) -> bytearray:
        """The bytes of rows [first, first + count) of the first dimension."""
        width = math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]
        data = bytearray(self.storage.read(self.path, self.at + first * width, self.at + (first + count) * width))
        if len(data) != count * width:
            raise BadFile(self.path, f"it ended while rows {first} to {first + count} of a tensor were read")
        return data

    def part(self, first: int, shape: tuple[int, ...]) -> Entry:
        """The elements from number `first` on, as a tensor of this shape."""
        return dataclasses.replace(self, shape=shape, at=self.at + first * ITEM_BYTES[self.dtype])


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A tensor to be written and who gives its bytes, asked once, when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Buffer]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def entries(storage: Storage, path: str) -> dict[str, Entry]:
    """The tensors of a file by name; their bytes are not read."""
    size = storage.size(path)
    length = int.from_bytes(storage.read(path, 0, 8), "little")
    if not 2 <= length <= min(LONGEST_HEADER, size - 8):
        raise BadFile(path, f"a header of {length} bytes in a file of {size}")
    begin = 8 + length
    found, end = {}, begin
    try:
        for name, value in json.loads(storage.read(path, 8, begin)).items():
            if name == METADATA:
                continue
            first, last = value["data_offsets"]
            entry = Entry(storage, path, DTYPES[value["dtype"]], tuple(value["shape"]), begin + first)
            if first < 0 or last - first != math.prod(entry.shape) * ITEM_BYTES[entry.dtype]:
                raise ValueError(f"{name} is {value}")
            found[name] = entry
            end = max(end, begin + last)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadFile(path, f"its header is malformed ({error!r})") from None
    if end != size:
        raise BadFile(path, f"it has {size} bytes where its header speaks of {end}")
    return found


def write(storage: Storage, path: str, sources: Iterable[Source]) -> None:
    """Write a new file; one tensor's bytes are held at a time."""
    sources = list(sources)
    header, at = {METADATA: {"format": "pt"}}, 0  # without it Hugging Face's loader refuses the file
    for source in sources:
        offsets = [at, at := at + source.nbytes]
        header[source.name] = {"dtype": CODES[source.dtype], "shape": source.shape, "data_offsets": offsets}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with storage.write_stream(path) as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for source in sources:
            data = memoryview(source.data())
            if data.nbytes != source.nbytes:
                raise ValueError(f"{source.name}: {data.nbytes} bytes for a tensor of {source.nbytes}")
            out.write(data)
