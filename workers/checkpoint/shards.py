"""What one rank writes: raw bytes of pieces of tensors, and an index with a checksum a block. No torch.

A shard is two files. `rank-00003.bin` holds the pieces one after the other, each at a multiple of 64 bytes,
zeros between; `rank-00003.json`, written after it, says what is in it:

    {"format": "phalanx-shard", "version": 1, "file": "rank-00003.bin", "nbytes": ..., "byte_order": "little",
     "checksum": "xxh3-128", "block_bytes": 262144, "blocks": ["<32 hex digits>", ...],
     "pieces": [{"tensor": "layers.0.attention.wo", "shape": [8, 6], "dtype": "bfloat16", "axes": [1, 0],
                 "offset": [0, 3], "extent": [8, 3], "at": 0}, ...]}

`shape` is the logical tensor's, `offset` and `extent` say which box of it the piece is, all in logical
dimensions. The bytes are row-major over the dimensions in the order of `axes`: with [1, 0] the file holds the
transpose, so that a slice of logical dimension 1 is a run of whole rows. Block n is bytes [n, n + 1) x
block_bytes of the file, so any byte range can be verified by itself; a shard may have blocks of any size, and
older ones have larger ones. Readers pass over keys that they don't know; a meaning that changes is a new version.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO

import xxhash

from workers.checkpoint.storage import Storage

FORMAT, VERSION = "phalanx-shard", 1
BLOCK = 256 << 10  # of new shards
ALIGN = 64
KEPT_BLOCKS = 8  # of a shard that is read
READ_BYTES = 4 << 20  # read and verified at once: a core's caches still have them then
WRITE_BYTES = 1 << 20  # summed up and written at once

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip

Buffer = bytes | bytearray | memoryview


class Corrupt(Exception):
    """A file of a checkpoint is not what was written: its path in the storage, and why it is known."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path = path
        self.why = why

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """A box of a logical tensor, and how its bytes are ordered."""

    tensor: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str
    axes: tuple[int, ...]  # stored order of the dimensions
    offset: tuple[int, ...]
    extent: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.tensor}: dtype {self.dtype} can't be stored; known: {', '.join(ITEM_BYTES)}")
        if sorted(self.axes) != list(range(len(self.shape))):
            raise ValueError(f"{self.tensor}: axes {self.axes} are no order of {len(self.shape)} dimensions")
        if not len(self.shape) == len(self.offset) == len(self.extent) or not all(
            0 <= start <= start + length <= size
            for size, start, length in zip(self.shape, self.offset, self.extent, strict=True)
        ):
            raise ValueError(f"{self.tensor}: {self.extent} at {self.offset} is not inside shape {self.shape}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.extent) * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A region and who gives its bytes, in stored order. Asked once, when its turn to be written comes."""

    region: Region
    data: Callable[[], Buffer]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A region and where its bytes begin in the shard."""

    region: Region
    at: int


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """What a shard's index file says."""

    file: str  # beside the index
    nbytes: int
    block: int  # bytes
    checksums: tuple[str, ...]  # one a block
    entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ShardRecord:
    """A written shard, as its rank reports it."""

    index: str  # path of the index file
    digest: str  # of the index file's bytes
    nbytes: int


def digest(data: Buffer) -> str:
    """xxh3-128, 32 hex digits."""
    return str(xxhash.xxh3_128_hexdigest(data))


def stem(rank: int) -> str:
    """The name of a rank's two files, without what they end with."""
    return f"rank-{rank:05d}"


def write(storage: Storage, folder: str, rank: int, pieces: Iterable[Piece]) -> ShardRecord:
    """Write the shard of one rank, then its index. One piece's bytes are held at a time."""
    name = stem(rank)
    entries = []
    with storage.write_stream(f"{folder}/{name}.bin") as out:
        file = _Checksummed(out)
        for piece in pieces:
            file.write(bytes(-file.nbytes % ALIGN))
            entries.append(Entry(piece.region, file.nbytes))
            data = memoryview(piece.data())
            if data.nbytes != piece.region.nbytes:
                raise ValueError(f"{piece.region.tensor}: {data.nbytes} bytes for a piece of {piece.region.nbytes}")
            if data.nbytes:  # an empty view can't be cast
                file.write(data.cast("B"))
    index = encode(Index(f"{name}.bin", file.nbytes, BLOCK, file.finish(), tuple(entries)))
    storage.create(f"{folder}/{name}.json", index)
    return ShardRecord(f"{folder}/{name}.json", digest(index), file.nbytes)


def encode(index: Index) -> bytes:
    pieces = [
        {**{field: _plain(getattr(entry.region, field)) for field in Region.__slots__}, "at": entry.at}
        for entry in index.entries
    ]
    value = {
        "format": FORMAT,
        "version": VERSION,
        "file": index.file,
        "nbytes": index.nbytes,
        "byte_order": "little",
        "checksum": "xxh3-128",
        "block_bytes": index.block,
        "blocks": list(index.checksums),
        "pieces": pieces,
    }
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def read_index(storage: Storage, path: str, expected: str) -> Index:
    """The index file at `path`, if its bytes have the expected digest. Raises Corrupt."""
    try:
        data = storage.read(path)
    except FileNotFoundError:
        raise Corrupt(path, "missing") from None
    if digest(data) != expected:
        raise Corrupt(path, f"digest {digest(data)} is not the expected {expected}: damaged, or of another attempt")
    try:
        return _decode(path, json.loads(data))
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(path, f"malformed: {error!r}") from error


class Reader:
    """Verified reads of one shard. The index is read when first needed; blocks that were used in part are kept for a
    while. Calls may come from several threads.
    """

    def __init__(self, storage: Storage, index: str, digest: str) -> None:
        self.storage = storage
        self.index_path = index
        self.digest = digest
        self._index: Index | None = None
        self._kept: collections.OrderedDict[int, memoryview] = collections.OrderedDict()
        self._lock = threading.Lock()

    @property
    def index(self) -> Index:
        with self._lock:
            if self._index is None:
                self._index = read_index(self.storage, self.index_path, self.digest)
            return self._index

    @property
    def path(self) -> str:
        return beside(self.index_path, self.index.file)

    def read(self, start: int, end: int) -> bytearray:
        """Bytes [start, end) of the shard, every block that they touch verified. Raises Corrupt."""
        out = bytearray(max(0, end - start))
        self.read_into(start, memoryview(out))
        return out

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out`, which is of bytes, with those from `start` on; every block that they touch is verified.

        Raises Corrupt; `out` may be filled in part then.
        """
        index, end = self.index, start + len(out)
        if not 0 <= start <= end <= index.nbytes:
            raise Corrupt(self.path, f"bytes {start} to {end} were asked for; it has {index.nbytes}")
        if start == end:
            return
        size = index.block
        whole = range(-(-start // size), max(-(-start // size), end // size))  # blocks that are read to their place
        edges = {start // size, (end - 1) // size}.difference(whole)
        with self._lock:
            kept = {n: self._kept[n] for n in edges if n in self._kept}
        fresh = {n: memoryview(bytearray(min(size, index.nbytes - n * size))) for n in edges.difference(kept)}
        place = {whole.start: out[whole.start * size - start : whole.stop * size - start]} if whole else {}
        for n, data in sorted((fresh | place).items()):
            self._fetch(index, n, data)
        for n, data in (kept | fresh).items():
            low, high = max(start, n * size), min(end, n * size + len(data))
            out[low - start : high - start] = data[low - n * size : high - n * size]
        self._keep(fresh)

    def verify(self) -> None:
        """Read and check every byte. Raises Corrupt."""
        index = self.index
        try:
            size = self.storage.size(self.path)
        except FileNotFoundError:
            raise Corrupt(self.path, "missing") from None
        if size != index.nbytes:
            raise Corrupt(self.path, f"has {size} bytes instead of {index.nbytes}")
        at_once = max(1, READ_BYTES // index.block)
        scratch = memoryview(bytearray(min(index.nbytes, at_once * index.block)))
        for first in range(0, len(index.checksums), at_once):
            self._fetch(index, first, scratch[: index.nbytes - first * index.block])

    def _keep(self, blocks: Mapping[int, memoryview]) -> None:
        with self._lock:
            self._kept.update(blocks)
            while len(self._kept) > KEPT_BLOCKS:
                self._kept.popitem(last=False)

    def _fetch(self, index: Index, first: int, out: memoryview) -> None:
        """Fill `out`, which is as long as some blocks, from the one numbered `first` on, and verify them there."""
        at_once = max(1, READ_BYTES // index.block) * index.block
        for low in range(0, len(out), at_once):
            part, start = out[low : low + at_once], first * index.block + low
            try:
                length = self.storage.read_into(self.path, start, part)
            except FileNotFoundError:
                raise Corrupt(self.path, "missing") from None
            if length < len(part):
                raise Corrupt(self.path, f"cut short: ends at byte {start + length} of {index.nbytes}")
            for n, at in enumerate(range(0, len(part), index.block), start // index.block):
                block = part[at : at + index.block]
                if digest(block) != index.checksums[n]:
                    span = f"bytes {start + at} to {start + at + len(block)}"
                    raise Corrupt(self.path, f"{span} (block {n}) fail their checksum")


def beside(path: str, name: str) -> str:
    """The file `name` in the folder of the file `path`."""
    return f"{path.rpartition('/')[0]}/{name}"


class _Checksummed:
    """A stream whose blocks are summed up while it is written."""

    def __init__(self, out: BinaryIO) -> None:
        self.nbytes = 0
        self._out = out
        self._done: list[str] = []
        self._block = xxhash.xxh3_128()

    def write(self, data: Buffer) -> None:
        view = memoryview(data)
        for start in range(0, len(view), WRITE_BYTES):
            part = view[start : start + WRITE_BYTES]
            self._sum_up(part)
            self._out.write(part)  # while a core's caches still have it

    def finish(self) -> tuple[str, ...]:
        if self.nbytes % BLOCK:
            self._end_block()
        return tuple(self._done)

    def _sum_up(self, view: memoryview) -> None:
        while view:
            room = BLOCK - self.nbytes % BLOCK
            part, view = view[:room], view[room:]
            self._block.update(part)
            self.nbytes += len(part)
            if self.nbytes % BLOCK == 0:
                self._end_block()

    def _end_block(self) -> None:
        self._done.append(self._block.hexdigest())
        self._block.reset()


def _decode(path: str, value: dict[str, Any]) -> Index:
    if value["format"] != FORMAT or value["version"] != VERSION:
        raise Corrupt(path, f"is {value['format']} version {value['version']}; this reads {FORMAT} version {VERSION}")
    index = Index(
        file=value["file"],
        nbytes=value["nbytes"],
        block=value["block_bytes"],
        checksums=tuple(value["blocks"]),
        entries=tuple(_entry(piece) for piece in value["pieces"]),
    )
    if "/" in index.file or len(index.checksums) != -(-index.nbytes // index.block):
        raise ValueError(f"{len(index.checksums)} checksums for {index.nbytes} bytes of {index.file!r}")
    for entry in index.entries:
        if not 0 <= entry.at <= entry.at + entry.region.nbytes <= index.nbytes:
            raise ValueError(f"{entry.region.tensor} at byte {entry.at} is not inside {index.nbytes} bytes")
    return index


def _entry(piece: dict[str, Any]) -> Entry:
    boxes = (tuple(piece[field]) for field in ("axes", "offset", "extent"))
    return Entry(Region(piece["tensor"], tuple(piece["shape"]), piece["dtype"], *boxes), piece["at"])


def _plain(value: str | tuple[int, ...]) -> str | list[int]:
    return value if isinstance(value, str) else list(value)
