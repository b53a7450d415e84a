"""Text that was made into tokens once: shards in Megatron's format, and `tokens.json`, which names and checks them.

    {"version": 1, "tokenizer": {"name", "digest", "size"}, "dtype": "uint16", "checksum": "xxh3-128",
     "shards": [{"name", "documents", "tokens", "nbytes", "bin", "idx"}], "documents", "tokens"}

`bin` and `idx` are digests of the two files of a shard. The order of the shards is the order of the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Literal

import xxhash
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from pydantic import Field, ValidationError

from workers.data import indexed
from workers.data.text import DataError
from workers.models.spec import Spec

NAME = "tokens.json"
PIECE = 1 << 22
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""xxh3-128. The name of a node's copy too: nothing else may come out of a file that somebody wrote."""


class TokenizerNote(Spec):
    name: str
    digest: str = Field(description="of its file; empty for one that is built in")
    size: int = Field(gt=0, description="ids that it has")


class Shard(Spec):
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="of both files, without their endings")
    documents: int = Field(ge=0)
    tokens: int = Field(ge=0)
    nbytes: int = Field(ge=0)
    bin: Digest
    idx: Digest


class Prepared(Spec):
    version: int = Field(ge=1, le=1)
    tokenizer: TokenizerNote
    dtype: Literal["uint16", "int32"]
    checksum: str = "xxh3-128"
    shards: tuple[Shard, ...]
    documents: int
    tokens: int


def found(uri: str) -> bool:
    """Whether this folder holds prepared tokens."""
    fs, path = url_to_fs(uri)
    return not any(char in path for char in "*?[") and bool(fs.isfile(f"{path.rstrip('/')}/{NAME}"))


def read(uri: str) -> Prepared:
    """DataError: it is not there, or not whole."""
    fs, path = url_to_fs(uri)
    place = f"{uri.rstrip('/')}/{NAME}"
    try:
        return Prepared.model_validate_json(fs.cat_file(f"{path.rstrip('/')}/{NAME}"))
    except FileNotFoundError:
        raise DataError(f"{place} is not there: make it by `phalanx data prepare`") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{place} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def write(uri: str, made: Prepared) -> None:
    fs, path = url_to_fs(uri)
    fs.pipe_file(f"{path.rstrip('/')}/{NAME}", json.dumps(made.model_dump(), indent=1).encode())


def problems(uri: str, made: Prepared) -> Iterator[str]:
    """What is wrong with the files of each shard, every byte read: one sentence each."""
    fs, path = url_to_fs(uri)
    for shard in made.shards:
        for ending, wanted in (("bin", shard.bin), ("idx", shard.idx)):
            name = f"{shard.name}.{ending}"
            try:
                digest = _digest(fs, f"{path.rstrip('/')}/{name}")
            except FileNotFoundError:
                yield f"{name} is not there"
                continue
            if digest != wanted:
                yield f"{name} is not what was written: its digest is {digest}, not {wanted}"
            elif ending == "idx":
                index = indexed.parse(fs.cat_file(f"{path.rstrip('/')}/{name}"))
                if (len(index.lengths), index.tokens) != (shard.documents, shard.tokens):
                    yield f"{name} tells of {index.tokens} tokens in {len(index.lengths)} documents"


def _digest(fs: AbstractFileSystem, path: str) -> str:
    digest = xxhash.xxh3_128()
    with fs.open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
