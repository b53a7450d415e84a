"""A checkpoint is a manifest: one JSON file that says which bytes of which shard are which part of a tensor.

Knows storage and shards; no torch, and nothing of who decides when to save. Creating the manifest, if no
other is there, is what publishes the checkpoint; without it the shards are nobody's. Below the storage of a
job:

    checkpoints/0000000300/2-9f3c/rank-00000.bin, .json, ...     step 300, attempt 2, token 9f3c
    manifests/0000000300-000002.json

A manifest begins with `{"digest":"<32 hex digits>",` and the digest is the xxh3-128 of all bytes that follow.
Then come: format and version; job, step, attempt, token, created_at (Unix seconds); layout and model, as they
were; `header`, the state that belongs to no layout, equal on all ranks:

    {"samples": 4800, "ledger": [{"attempt": 1, "start": 0, "end": 4800}], "seed": 7, "optimizer": {...}}

`shards` with path, nbytes, index and the index's digest (each index holds its shard's checksums, so that a
reader verifies what it reads and no more); and `tensors`, name to shape, dtype, axes and pieces, each with
offset, extent, shard (its place in `shards`) and the byte it begins `at`. Tensors are logical, whatever the
layout was: a reader of any layout finds the boxes that meet its own. Readers pass over keys that they don't
know; a meaning that changes is a new version.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import gc
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from workers.checkpoint import shards
from workers.checkpoint.shards import Corrupt, Entry, Reader, ShardRecord
from workers.checkpoint.storage import Storage

FORMAT, VERSION = "phalanx-checkpoint", 1
MANIFESTS, FOLDERS = "manifests", "checkpoints"
REQUESTS = 8  # at the same time

_NAME = re.compile(rf"{MANIFESTS}/(\d{{10,}})-(\d{{6,}})\.json")
_FOLDER = re.compile(rf"{FOLDERS}/(\d{{10,}})/(\d+)-([^/]+)")
_OPENING = re.compile(rb'\{"digest":"([0-9a-f]{32})",')


class BadCheckpoint(Exception):
    """A checkpoint that must not be loaded: its manifest's path, and why."""

    def __init__(self, manifest: str, reason: str) -> None:
        super().__init__(manifest, reason)
        self.manifest = manifest
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.manifest}: {self.reason}"


class Incomplete(ValueError):
    """The shards don't make a whole checkpoint: nothing may be published."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    path: str
    nbytes: int
    index: str  # path
    index_digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A box of a logical tensor and where its bytes are."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    shard: int  # place in the manifest's shards
    at: int  # byte


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor. Its pieces cover it, each element once."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[int, ...]  # stored order of the dimensions
    pieces: tuple[Stored, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    job: str
    step: int
    attempt: int
    token: str
    created_at: float
    layout: Mapping[str, Any]
    model: Mapping[str, Any]
    header: Mapping[str, Any]
    shards: tuple[Shard, ...]
    tensors: Mapping[str, Tensor]

    @property
    def path(self) -> str:
        return path(self.step, self.attempt)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


def folder(step: int, attempt: int, token: str) -> str:
    """Where the shards of an attempt's checkpoint are."""
    return f"{FOLDERS}/{step:010d}/{attempt}-{token}"


def token_of(path: str) -> str:
    """The token in the path of a shard or its index."""
    match = _FOLDER.match(path)
    if match is None:
        raise ValueError(f"{path!r} is in no folder of a checkpoint")
    return match[3]


def generation(folder: str) -> tuple[int, int, int]:
    """(attempt, rollbacks in it, step) of a folder of shards: the order in which they were begun."""
    match = _FOLDER.fullmatch(folder)
    if match is None:
        raise ValueError(f"{folder!r} is no folder of a checkpoint")
    rolled = match[3].rpartition("+")[2] if "+" in match[3] else "0"
    return int(match[2]), int(rolled), int(match[1])


def path(step: int, attempt: int) -> str:
    return f"{MANIFESTS}/{step:010d}-{attempt:06d}.json"


def step_of(path: str) -> int:
    """The step in a manifest's path."""
    return key_of(path)[0]


def key_of(path: str) -> tuple[int, int]:
    """(step, attempt) of a manifest's path."""
    match = _NAME.fullmatch(path)
    if match is None:
        raise ValueError(f"{path!r} is not a manifest's path")
    return int(match[1]), int(match[2])


def folder_of(path: str) -> str | None:
    """The folder of shards that this file is in, if it is in one."""
    match = _FOLDER.match(path)
    return match[0] if match else None


def attempt_of(path: str) -> int:
    """The attempt in a manifest's path."""
    return key_of(path)[1]


def assemble(
    storage: Storage,
    *,
    job: str,
    step: int,
    attempt: int,
    token: str,
    layout: Mapping[str, Any],
    model: Mapping[str, Any],
    header: Mapping[str, Any],
    records: Iterable[ShardRecord],
    created_at: float,
) -> Manifest:
    """The manifest of these shards. Corrupt: an index is wrong. Incomplete: elements miss or repeat."""
    records = sorted(records, key=lambda record: record.index)
    home = folder(step, attempt, token)
    for record in records:
        if record.index.rpartition("/")[0] != home:
            raise Incomplete(f"{record.index} is not in {home}, the folder of this attempt and step")
    with ThreadPoolExecutor(REQUESTS) as pool:
        listed = list(pool.map(lambda record: _listed(storage, record), records))
    named = [shard for shard, _ in listed]
    with _uncollected():
        tensors = _tensors(named, [entries for _, entries in listed])
    return Manifest(job, step, attempt, token, created_at, layout, model, header, tuple(named), tensors)


def publish(storage: Storage, manifest: Manifest) -> str:
    """Publish the checkpoint; its path. FileExistsError: another one has this step and attempt."""
    data = encode(manifest)
    try:
        storage.create(manifest.path, data)
    except FileExistsError:
        # A request whose answer was lost is sent again, and finds itself.
        if storage.read(manifest.path) != data:
            raise
    return manifest.path


def load(storage: Storage, path: str) -> Manifest:
    """The manifest at `path`, its version, digest and name verified; no shard is read. Raises BadCheckpoint."""
    try:
        document = decode(path, storage.read(path))
    except FileNotFoundError:
        raise BadCheckpoint(path, "missing") from None
    if document.path != path:
        raise BadCheckpoint(path, f"is the manifest of step {document.step}, attempt {document.attempt}")
    return document


def published(storage: Storage) -> list[str]:
    """Paths of all manifests, the newest (step, then attempt) first."""
    return sorted((name for name in storage.names(MANIFESTS) if _NAME.fullmatch(name)), key=key_of, reverse=True)


def readers(storage: Storage, manifest: Manifest) -> tuple[Reader, ...]:
    """One verified reader for each of the manifest's shards, in its order."""
    return tuple(Reader(storage, shard.index, shard.index_digest) for shard in manifest.shards)


def verify(storage: Storage, path: str) -> Manifest:
    """Read every byte of the checkpoint and check every block. Raises BadCheckpoint."""
    manifest = load(storage, path)
    with ThreadPoolExecutor(REQUESTS) as pool:
        try:
            list(pool.map(Reader.verify, readers(storage, manifest)))
        except Corrupt as error:
            raise BadCheckpoint(path, str(error)) from error
    return manifest


def encode(manifest: Manifest) -> bytes:
    value = {
        "format": FORMAT,
        "version": VERSION,
        "job": manifest.job,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "token": manifest.token,
        "created_at": manifest.created_at,
        "layout": dict(manifest.layout),
        "model": dict(manifest.model),
        "header": dict(manifest.header),
        "shards": [dataclasses.asdict(shard) for shard in manifest.shards],
        "tensors": {name: _plain(tensor) for name, tensor in manifest.tensors.items()},
    }
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()[1:]
    return b'{"digest":"' + shards.digest(body).encode() + b'",' + body


def decode(path: str, data: bytes) -> Manifest:
    """The manifest that these bytes of the file at `path` are. Raises BadCheckpoint."""
    try:
        with _uncollected():
            return _decoded(path, data)
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(path, f"the manifest is malformed: {error!r}") from error


def _decoded(path: str, data: bytes) -> Manifest:
    value = json.loads(data)
    if (value["format"], value["version"]) != (FORMAT, VERSION):
        is_a, reads = f"{value['format']} version {value['version']}", f"{FORMAT} version {VERSION}"
        raise BadCheckpoint(path, f"is {is_a}; this reads {reads}")
    opening = _OPENING.match(data)
    if opening is None or shards.digest(data[opening.end() :]) != opening[1].decode():
        raise BadCheckpoint(path, "the manifest fails its digest")
    return Manifest(
        job=value["job"],
        step=value["step"],
        attempt=value["attempt"],
        token=value["token"],
        created_at=value["created_at"],
        layout=value["layout"],
        model=value["model"],
        header=value["header"],
        shards=tuple(Shard(**_known(Shard, shard)) for shard in value["shards"]),
        tensors={name: _tensor(tensor) for name, tensor in value["tensors"].items()},
    )


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Millions of objects come and none of them is garbage: looking for it takes several times as long as the work."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _known(kind: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.name: value[field.name] for field in dataclasses.fields(kind)}
    return {name: tuple(item) if isinstance(item, list) else item for name, item in fields.items()}


def _tensor(value: Mapping[str, Any]) -> Tensor:
    """Field by field: there are hundreds of thousands of pieces."""
    pieces = (Stored(tuple(it["offset"]), tuple(it["extent"]), it["shard"], it["at"]) for it in value["pieces"])
    return Tensor(tuple(value["shape"]), value["dtype"], tuple(value["axes"]), tuple(pieces))


def _plain(tensor: Tensor) -> dict[str, Any]:
    pieces = [
        {"offset": piece.offset, "extent": piece.extent, "shard": piece.shard, "at": piece.at}
        for piece in tensor.pieces
    ]
    return {"shape": tensor.shape, "dtype": tensor.dtype, "axes": tensor.axes, "pieces": pieces}


def _listed(storage: Storage, record: ShardRecord) -> tuple[Shard, Sequence[Entry]]:
    """A shard and what is in it; its checksums, which are the most of an index, are let go."""
    index = shards.read_index(storage, record.index, record.digest)
    return Shard(shards.beside(record.index, index.file), index.nbytes, record.index, record.digest), index.entries


def _tensors(named: Sequence[Shard], listed: Sequence[Sequence[Entry]]) -> dict[str, Tensor]:
    first: dict[str, tuple[shards.Region, str]] = {}
    pieces: dict[str, list[Stored]] = {}
    for number, (shard, entries) in enumerate(zip(named, listed, strict=True)):
        for entry in entries:
            region = entry.region
            known, where = first.setdefault(region.tensor, (region, shard.path))
            if (known.shape, known.dtype, known.axes) != (region.shape, region.dtype, region.axes):
                raise Incomplete(
                    f"{region.tensor} is {known.dtype} {known.shape} stored as {known.axes} in {where}, "
                    f"but {region.dtype} {region.shape} stored as {region.axes} in {shard.path}"
                )
            stored = Stored(region.offset, region.extent, number, entry.at)
            pieces.setdefault(region.tensor, []).append(stored)
    tensors = {}
    for name, (region, _) in sorted(first.items()):
        tensor = Tensor(region.shape, region.dtype, region.axes, tuple(sorted(pieces[name], key=_order)))
        _check_cover(name, tensor, named)
        tensors[name] = tensor
    return tensors


def _order(piece: Stored) -> tuple[int, ...]:
    return piece.offset


def _check_cover(name: str, tensor: Tensor, named: Sequence[Shard]) -> None:
    """Pieces that don't meet and have the tensor's volume together cover it, each element once."""
    pieces = [piece for piece in tensor.pieces if math.prod(piece.extent)]
    for one, other in _meeting(pieces, len(tensor.shape)):
        boxes = f"{one.extent} at {one.offset} and {other.extent} at {other.offset}"
        raise Incomplete(f"{name}: {boxes} overlap ({named[one.shard].path}, {named[other.shard].path})")
    covered, volume = sum(math.prod(piece.extent) for piece in pieces), math.prod(tensor.shape)
    if covered != volume:
        raise Incomplete(f"{name}: {volume - covered} of {volume} elements are in no shard")


def _meeting(pieces: Sequence[Stored], dims: int) -> Iterable[tuple[Stored, Stored]]:
    """Pairs of pieces that have an element in common: a sweep along the dimension that is cut most."""
    if dims == 0:
        yield from itertools.pairwise(pieces)
        return
    sweep = max(range(dims), key=lambda dim: len({piece.offset[dim] for piece in pieces}))
    active: list[tuple[int, int, Stored]] = []  # by end, so that what lies behind is cut off
    for number, piece in enumerate(sorted(pieces, key=lambda piece: piece.offset[sweep])):
        del active[: bisect.bisect_left(active, (piece.offset[sweep] + 1,))]
        for _, _, other in active:
            if _meet(piece, other):
                yield other, piece
        bisect.insort(active, (piece.offset[sweep] + piece.extent[sweep], number, piece))


def _meet(one: Stored, other: Stored) -> bool:
    return all(
        a < b + m and b < a + n for a, n, b, m in zip(one.offset, one.extent, other.offset, other.extent, strict=True)
    )
