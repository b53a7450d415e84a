"""Makes text into tokens once, file by file and in parallel; what was finished stays so when it is started again.

Each file of the source becomes one or more shards and a note, `parts/NNNNN.json`, which says of what it was made. A
note is written after its shards, `tokens.json` after all notes: whatever is named is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import xxhash
from fsspec.core import url_to_fs
from pydantic import ValidationError

from workers.data import indexed, prepared, text, tokens
from workers.data.prepared import Prepared, Shard, TokenizerNote
from workers.models.spec import Spec

SHARD_TOKENS = 1 << 27
PARTS = "parts"


class Plan(Spec):
    """What is made of one file, and from what: another one makes another note."""

    uri: str
    size: int
    changed: str  # what the file system says of its version
    tokenizer: TokenizerNote
    field: str
    shard_tokens: int


class Part(Spec):
    plan: Plan
    shards: tuple[Shard, ...]


def prepare(
    source: str,
    to: str,
    *,
    tokenizer: str = "byte",
    field: str = "text",
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    told: Callable[[int, int, int], None] = lambda done, files, tokens: None,
) -> Prepared:
    """All of a path, glob or URI. `told`: files that are done, of how many, and the tokens in them.

    DataError: what is wrong with which file. What was made so far stays, and is not made again.
    """
    note = _note(tokenizer)
    plans = [_plan(uri, note, field, shard_tokens) for uri in text.files(source)]
    parts: dict[int, Part] = {}
    for number, plan in enumerate(plans):
        if (known := _known(to, number)) is not None and known.plan == plan:
            parts[number] = known

    def tell() -> None:
        told(len(parts), len(plans), sum(shard.tokens for part in parts.values() for shard in part.shards))

    tell()
    missing = [number for number in range(len(plans)) if number not in parts]
    for number, part in _made([(number, plans[number]) for number in missing], to, workers):
        parts[number] = part
        tell()
    shards = tuple(shard for number in sorted(parts) for shard in parts[number].shards)
    if not any(shard.tokens for shard in shards):
        raise text.DataError(f"{source} has no text")
    made = Prepared(
        version=1,
        tokenizer=note,
        dtype=indexed.dtype_of(note.size).name,
        shards=shards,
        documents=sum(shard.documents for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
    )
    prepared.write(to, made)
    return made


def _made(plans: list[tuple[int, Plan]], to: str, workers: int) -> Iterator[tuple[int, Part]]:
    if workers == 1 or len(plans) < 2:
        for number, plan in plans:
            yield number, _part(number, plan, to)
        return
    with ProcessPoolExecutor(min(workers, len(plans)), get_context("spawn")) as pool:
        asked = {number: pool.submit(_part, number, plan, to) for number, plan in plans}
        try:
            for number, made in asked.items():
                yield number, made.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _note(name: str) -> TokenizerNote:
    digest = ""
    if name != "byte":
        fs, path = url_to_fs(name)
        digest = hashlib.sha256(fs.cat_file(path)).hexdigest()
    return TokenizerNote(name=name, digest=digest, size=tokens.tokenizer(name).size)


def _plan(uri: str, note: TokenizerNote, field: str, shard_tokens: int) -> Plan:
    fs, path = url_to_fs(uri)
    info: dict[str, Any] = fs.info(path)
    changed = next((str(info[name]) for name in ("ETag", "etag", "mtime", "LastModified") if info.get(name)), "")
    size = int(info.get("size") or 0)
    return Plan(uri=uri, size=size, changed=changed, tokenizer=note, field=field, shard_tokens=shard_tokens)


def _known(to: str, number: int) -> Part | None:
    fs, root = url_to_fs(to)
    with contextlib.suppress(FileNotFoundError, ValidationError):
        return Part.model_validate_json(fs.cat_file(f"{root}/{PARTS}/{number:05d}.json"))
    return None


def _part(number: int, plan: Plan, to: str) -> Part:
    """The shards of one file, written; and then its note."""
    fs, root = url_to_fs(to)
    fs.makedirs(f"{root}/{PARTS}", exist_ok=True)
    using = tokens.tokenizer(plan.tokenizer.name)
    documents = text.documents(plan.uri, plan.field)
    encoded = (using.encode(document) for document in documents)
    shards = tuple(_shards(fs, root, number, plan, encoded))
    part = Part(plan=plan, shards=shards)
    fs.pipe_file(f"{root}/{PARTS}/{number:05d}.json", json.dumps(part.model_dump()).encode())
    return part


def _shards(fs: Any, root: str, number: int, plan: Plan, encoded: Iterator[Any]) -> Iterator[Shard]:
    dtype, first = indexed.dtype_of(plan.tokenizer.size), next(encoded, None)
    count = 0
    while first is not None:
        name = f"{number:05d}-{count:05d}"
        with tempfile.NamedTemporaryFile() as spool:  # an object store takes no appending
            writer = indexed.Writer(spool, dtype)  # type: ignore[arg-type]
            while first is not None and (not writer.lengths or writer.tokens + len(first) <= plan.shard_tokens):
                writer.add(first)
                first = next(encoded, None)
            spool.flush()
            fs.put_file(spool.name, f"{root}/{name}.bin")
        index = writer.index()
        fs.pipe_file(f"{root}/{name}.idx", index)
        yield Shard(
            name=name, documents=len(writer.lengths), tokens=writer.tokens, nbytes=writer.tokens * dtype.itemsize,
            bin=writer.digest, idx=xxhash.xxh3_128_hexdigest(index),
        )  # fmt: skip
        count += 1
