"""How fast samples are read, against what a step needs.

`python tests/bench/data.py --json`: tokens a second of one process that reads batches of prepared text, cut from one
run, packed, and mixed from two sources, in the operating system's memory. `need_tokens_per_s`: of a replica that needs
many, a model of a billion parameters on one H100 at half its peak (989 TFLOP/s, 6 FLOPs a parameter and token).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

import numpy as np
import xxhash

from workers.data import indexed, prepared
from workers.data.prepared import Prepared, Shard, TokenizerNote
from workers.data.reading import Reading
from workers.spec import DataSpec, SourceSpec

SEQ, BATCH, VOCABULARY = 4096, 8, 128_256
LENGTHS = (50, 4000)  # tokens of a document


def made(place: Path, tokens: int, seed: int) -> str:
    """Prepared text of so many random tokens, in four shards."""
    place.mkdir()
    chance, shards = np.random.default_rng(seed), []
    for number in range(4):
        name = f"{number:05d}-00000"
        with (place / f"{name}.bin").open("wb") as out:
            writer = indexed.Writer(out, indexed.dtype_of(VOCABULARY))
            while writer.tokens < tokens // 4:
                writer.add(chance.integers(0, VOCABULARY, chance.integers(*LENGTHS)))
        index = writer.index()
        (place / f"{name}.idx").write_bytes(index)
        shards.append(
            Shard(
                name=name, documents=len(writer.lengths), tokens=writer.tokens, nbytes=writer.tokens * 4,
                bin=writer.digest, idx=xxhash.xxh3_128_hexdigest(index),
            )
        )  # fmt: skip
    note = TokenizerNote(name="bench", digest="", size=VOCABULARY)
    total = sum(shard.tokens for shard in shards)
    documents = sum(shard.documents for shard in shards)
    prepared.write(
        str(place),
        Prepared(version=1, tokenizer=note, dtype="int32", shards=tuple(shards), documents=documents, tokens=total),
    )
    return str(place)


def rate(data: DataSpec, seconds: float) -> float:
    """Tokens a second, padding not counted."""
    reading, cursor, tokens = Reading(data, SEQ, 7), 0, 0
    reading.rows(0, BATCH)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        _, targets, _ = reading.rows(cursor, BATCH)
        tokens, cursor = tokens + int((targets >= 0).sum()), cursor + BATCH
    return round(tokens / (time.perf_counter() - began))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--need", type=float, default=82_000.0, help="tokens a second of a replica")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        one, two = (made(Path(folder) / name, given.tokens // 2, seed) for seed, name in enumerate(("one", "two")))
        mixed = (SourceSpec(source=one, weight=3.0), SourceSpec(source=two))
        found = {
            "cut_tokens_per_s": rate(DataSpec(source=one), given.seconds),
            "packed_tokens_per_s": rate(DataSpec(source=one, packing="documents"), given.seconds),
            "mixed_tokens_per_s": rate(DataSpec(sources=mixed), given.seconds),
            "mixed_packed_tokens_per_s": rate(DataSpec(sources=mixed, packing="documents"), given.seconds),
            "need_tokens_per_s": given.need,
        }
    for name, value in found.items():
        print(f"{name:28} {value:,}")
    if given.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
