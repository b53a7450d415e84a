"""Models from and to a Hugging Face folder: config.json and safetensors, at a path or fsspec URI.

    python -m workers.models.huggingface import URI --root runs --job name
    python -m workers.models.huggingface export runs/name/manifests/0000000300-000001.json FOLDER

An import publishes a checkpoint at step 0 with optimizer state of zeros, which the job of that name resumes from in any
layout, and prints the `model` of its job file. An export takes any published checkpoint. Tokenizers are not touched.
Nothing is skipped or rounded in silence: names, shapes and dtypes fit one by one, or everything that doesn't is listed.
Which families there are, and what is called what, is known to `workers.models.families`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from workers.checkpoint import boxes, logical, manifest, shards
from workers.checkpoint.boxes import Box
from workers.checkpoint.manifest import Manifest, Stored
from workers.checkpoint.shards import Piece, Region
from workers.checkpoint.storage import Storage
from workers.models import families, safetensors
from workers.models.decoder import Decoder
from workers.models.sharding import sliced
from workers.spec import ModelSpec, ParallelLayout

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
STATE = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
EXACTLY_IN = {"bfloat16": ("float32", "float64"), "float16": ("float32", "float64"), "float32": ("float64",)}
AT_ONCE = 256 << 20  # bytes held by an import, as stored there
SHARD = 4 << 30  # bytes
NAMED = 10  # problems in a message

Item = TypeVar("Item")
Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, manifest.Tensor]


class Refused(ValueError):
    """The model can't be taken or given as it is; the message lists why."""

    def __init__(self, uri: str, problems: list[str]) -> None:
        more = f", and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        super().__init__(f"{uri}: {'; '.join(problems[:NAMED])}{more}")


@dataclasses.dataclass(frozen=True, slots=True)
class Weight:
    """A parameter that is still in storage, whole or, where it is a stack of experts, one by one."""

    shape: tuple[int, ...]
    parts: tuple[safetensors.Entry, ...]

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    def rows(self, first: int, count: int) -> torch.Tensor:
        if len(self.parts) == 1:
            return _read(self.parts[0], first, count)
        rows = torch.empty(count, *self.shape[1:], dtype=getattr(torch, self.dtype))
        for row, part in zip(rows, self.parts[first : first + count], strict=True):
            row.copy_(_read(part, 0, part.shape[0]))
        return rows

    def whole(self) -> torch.Tensor:
        return self.rows(0, self.shape[0])


def read(uri: str, seq_len: int | None = None, dtype: str | None = None) -> tuple[ModelSpec, dict[str, Weight]]:
    """The model in a folder and its parameters by our names, none of them read yet.

    Every tensor must have `dtype`; by default the one that config.json names, or the embedding's. Raises Refused,
    families.Unsupported, and safetensors.BadFile.
    """
    storage = Storage.open(uri)
    if not storage.exists(CONFIG):
        raise Refused(uri, [f"there is no {CONFIG}; a folder that `save_pretrained` wrote is wanted"])
    config = json.loads(storage.read(CONFIG))
    spec = families.spec_from_config(config, seq_len)
    found, problems = _found(storage)
    if spec.tied_embedding and _repeats(found, families.HEAD, families.EMBEDDING):
        del found[families.HEAD]
    shapes, _ = _shapes(spec)
    origins = families.origins(spec, shapes, found)
    problems += _misfits({one.tensor: one.shape for many in origins.values() for one in many}, found)
    embedding = found.get(families.EMBEDDING)
    asked = dtype or config.get("dtype") or config.get("torch_dtype") or (embedding and embedding.dtype)
    problems += [f"{name} is {entry.dtype}, not {asked}" for name, entry in found.items() if entry.dtype != asked]
    if problems:
        raise Refused(uri, problems)
    return spec, {
        name: Weight(shape, tuple(found[one.tensor].part(one.first, one.part) for one in origins[name]))
        for name, shape in shapes.items()
    }


def import_(
    uri: str,
    root: str,
    job: str,
    *,
    seq_len: int | None = None,
    stored_as: str | None = None,
    dtype: str = "float32",
    optimizer: str = "adamw",
) -> Manifest:
    """Publish a folder's model as step 0 of the job `{root}/{job}`, which must have no checkpoint yet.

    `dtype` is that of the job's parameters: float64 where its precision is float64, else float32. It must hold every
    value exactly. `stored_as` is what `read` calls dtype.
    """
    spec, weights = read(uri, seq_len, stored_as)
    wider = {name: weight.dtype for name, weight in weights.items() if not holds(dtype, weight.dtype)}
    if wider:
        raise Refused(uri, [f"{name} is {stored}, which {dtype} would round" for name, stored in wider.items()])
    storage = Storage.open(root).child(job)
    if there := manifest.published(storage):
        raise Refused(storage.uri, [f"the job has checkpoints already, the newest {there[0]}; choose another name"])
    folder_of = manifest.folder(0, 0, token := uuid.uuid4().hex[:8])
    pieces = [piece for name in weights for piece in _pieces(name, weights[name], dtype, STATE[optimizer])]
    parts = _parts(pieces, lambda piece: piece.region.nbytes, SHARD)
    document = manifest.assemble(
        storage,
        job=job,
        step=0,
        attempt=0,
        token=token,
        layout=ParallelLayout().model_dump(),
        model=spec.model_dump(),
        header={"step": 0, "samples": 0, "ledger": [], "optimizer": {"name": optimizer, "steps": 0}, "source": uri},
        records=[shards.write(storage, folder_of, number, part) for number, part in enumerate(parts)],
        created_at=time.time(),
    )
    manifest.publish(storage, document)
    return document


def export(
    storage: Storage, document: Manifest, uri: str, *, dtype: str | None = None, file_bytes: int = SHARD
) -> None:
    """Write the model of a checkpoint in the job's `storage` to an empty folder.

    In `dtype`, by default as stored. One tensor of theirs is held at a time, and each block read is verified.
    Raises Refused, families.Unsupported and BadCheckpoint.
    """
    folder = emptied(uri)
    spec, stored, balances = _model(document)
    origins = families.origins(spec, {name: tensor.shape for name, tensor in stored.items()})
    taken = reading(storage, document)

    def source(name: str, origin: families.Origin, tensor: manifest.Tensor) -> safetensors.Source:
        return written(uri, origin, dtype or tensor.dtype, functools.partial(taken, name, tensor))

    if lost := [name for name, tensor in balances.items() if taken(name, tensor).any()]:
        raise Refused(document.path, [f"{name} is not zero, and has no place at Hugging Face" for name in lost])
    sources = [
        source(name, origin, tensor if len(origins[name]) == 1 else _row(tensor, number))
        for name, tensor in stored.items()
        for number, origin in enumerate(origins[name])
    ]
    write(folder, spec, sources, file_bytes)


def emptied(uri: str) -> Storage:
    """A folder to write to. Refused: something is there."""
    folder = Storage.open(uri)
    if folder.names():
        raise Refused(uri, ["the folder is not empty; name a new one"])
    return folder


Reading = Callable[[str, manifest.Tensor], torch.Tensor]


def reading(storage: Storage, document: Manifest) -> Reading:
    """What gives a checkpoint's tensor of a name whole, as it is stored."""
    readers = manifest.readers(storage, document)

    def taken(name: str, tensor: manifest.Tensor) -> torch.Tensor:
        whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        logical.load({name: whole}, dataclasses.replace(document, tensors={name: tensor}), storage, readers)
        return whole

    return taken


def written(uri: str, origin: families.Origin, dtype: str, taken: Callable[[], torch.Tensor]) -> safetensors.Source:
    """A tensor of theirs that is read as it is written, in another dtype. Refused: that has no room for its values."""

    def data() -> memoryview:
        whole = taken()
        given = whole.to(getattr(torch, dtype))
        if not torch.equal(given.isfinite(), whole.isfinite()):
            raise Refused(uri, [f"{origin.tensor} has values that are too large for {dtype}"])
        return _bytes(given)

    return safetensors.Source(origin.tensor, dtype, origin.shape, data)


def write(folder: Storage, spec: ModelSpec, sources: Sequence[safetensors.Source], file_bytes: int = SHARD) -> None:
    """In files of a size at most. config.json comes last: a folder without it is not whole."""
    files = _parts(sources, lambda source: source.nbytes, file_bytes)
    names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    for name, sources in zip(names if len(files) > 1 else [SINGLE], files, strict=True):
        safetensors.write(folder, name, sources)
    if len(files) > 1:
        total = sum(source.nbytes for sources in files for source in sources)
        where = {source.name: name for name, sources in zip(names, files, strict=True) for source in sources}
        folder.create(INDEX, _json({"metadata": {"total_size": total}, "weight_map": where}))
    folder.create(CONFIG, _json(families.config(spec, files[0][0].dtype)))


def _found(storage: Storage) -> tuple[dict[str, safetensors.Entry], list[str]]:
    """Every tensor in the folder's files, and where its index says otherwise."""
    if storage.exists(SINGLE):
        return safetensors.entries(storage, SINGLE), []
    if not storage.exists(INDEX):
        raise Refused(storage.uri, [f"there is neither {SINGLE} nor {INDEX}; other formats are not read"])
    where: dict[str, str] = json.loads(storage.read(INDEX))["weight_map"]
    found: dict[str, safetensors.Entry] = {}
    problems = []
    for file in sorted(set(where.values())):
        if not storage.exists(file):
            problems.append(f"{file} is missing")
            continue
        entries = safetensors.entries(storage, file)
        problems += [f"{name} is in {file}, against the index" for name in entries if where.get(name) != file]
        problems += [f"{name} is not in {file}" for name in where if where[name] == file and name not in entries]
        found.update(entries)
    return found, problems


def _shapes(spec: ModelSpec) -> tuple[Shapes, Shapes]:
    """Of the model's parameters, and of the balance of experts, which only a checkpoint has, where it is learnt."""
    with torch.device("meta"):
        model = Decoder(spec, spec.vocab_size)
    learnt = spec.experts is not None and spec.experts.bias_rate > 0
    balances = {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name.endswith("router.balance")}
    return {name: tuple(p.shape) for name, p in model.named_parameters()}, balances if learnt else {}


def _misfits(
    wanted: Mapping[str, tuple[int, ...]], there: Mapping[str, safetensors.Entry | manifest.Tensor]
) -> list[str]:
    """By name, where what is there is not what is wanted."""
    return [
        *(f"{name} is missing" for name in wanted if name not in there),
        *(f"{name} is unexpected" for name in there if name not in wanted),
        *(
            f"{name} has shape {there[name].shape}, not {shape}"
            for name, shape in wanted.items()
            if name in there and there[name].shape != shape
        ),
    ]


def _model(document: Manifest) -> tuple[ModelSpec, Tensors, Tensors]:
    """The spec of a checkpoint's model with its true vocabulary; where its parameters and its experts' balance are."""
    stored = {name.removeprefix("model."): t for name, t in document.tensors.items() if name.startswith("model.")}
    spec = ModelSpec.model_validate(document.model)
    if "embedding.weight" in stored:
        spec = spec.model_copy(update={"vocab_size": stored["embedding.weight"].shape[0]})
    families.of(spec)  # refuses what has none, before tensors are compared
    parameters, balances = _shapes(spec)
    if problems := _misfits(parameters | balances, stored):
        raise Refused(document.path, problems)
    return spec, {name: stored[name] for name in parameters}, {name: stored[name] for name in balances}


def _row(tensor: manifest.Tensor, number: int) -> manifest.Tensor:
    """One row of a tensor whose rows are stored one after the other, as a tensor of its own."""
    assert tensor.axes[0] == 0
    width = shards.ITEM_BYTES[tensor.dtype]
    pieces = tuple(
        Stored(piece.offset[1:], piece.extent[1:], piece.shard, piece.at + row * math.prod(piece.extent[1:]) * width)
        for piece in tensor.pieces
        if 0 <= (row := number - piece.offset[0]) < piece.extent[0]
    )
    return manifest.Tensor(tensor.shape[1:], tensor.dtype, tuple(axis - 1 for axis in tensor.axes[1:]), pieces)


def _pieces(name: str, weight: Weight, dtype: str, state: tuple[str, ...]) -> Iterator[Piece]:
    """A parameter and its optimizer state, in pieces of whole rows."""
    natural, dim = tuple(range(len(weight.shape))), sliced(Decoder.SHARDING, name)
    for first, count in row_ranges(weight.shape, dtype):
        rows = Box((first, *(0 for _ in weight.shape[1:])), (count, *weight.shape[1:]), kept=True)
        for offset, extent in boxes.tiles(rows, dim, shards.ITEM_BYTES[dtype]):
            region = Region(f"model.{name}", weight.shape, dtype, natural, offset, extent)
            yield Piece(region, functools.partial(_taken, weight, region))
            for slot in state:
                zeros = dataclasses.replace(region, tensor=f"optimizer.{slot}.{name}")
                yield Piece(zeros, functools.partial(bytes, zeros.nbytes))


def _read(entry: safetensors.Entry, first: int, count: int) -> torch.Tensor:
    data = entry.read(first, count)
    return torch.frombuffer(data, dtype=getattr(torch, entry.dtype)).view(count, *entry.shape[1:])


def _taken(weight: Weight, box: Region) -> memoryview:
    part = weight.rows(box.offset[0], box.extent[0])
    for dim, (first, count) in enumerate(zip(box.offset[1:], box.extent[1:], strict=True), 1):
        part = part.narrow(dim, first, count)
    return _bytes(part.to(getattr(torch, box.dtype)))


def row_ranges(shape: tuple[int, ...], dtype: str) -> Iterator[tuple[int, int]]:
    """(first, count) of rows that are held at once."""
    count = max(1, AT_ONCE // (math.prod(shape[1:]) * shards.ITEM_BYTES[dtype]))
    return ((first, min(count, shape[0] - first)) for first in range(0, shape[0], count))


def _parts(items: Iterable[Item], nbytes: Callable[[Item], int], limit: int) -> list[list[Item]]:
    """Cut in order into parts of at most `limit` bytes, or of one item where that is longer."""
    parts: list[list[Item]] = [[]]
    room = limit
    for item in items:
        if parts[-1] and nbytes(item) > room:
            parts.append([])
            room = limit
        parts[-1].append(item)
        room -= nbytes(item)
    return parts


def holds(dtype: str, other: str) -> bool:
    """Whether every value of `other` is one of `dtype`."""
    return dtype == other or dtype in EXACTLY_IN.get(other, ())


def _repeats(found: Mapping[str, safetensors.Entry], name: str, original: str) -> bool:
    """Whether `name` is there, and is `original` once more."""
    if name not in found or original not in found:
        return False
    one, other = found[name], found[original]
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return all(one.read(*rows) == other.read(*rows) for rows in row_ranges(one.shape, one.dtype))


def _bytes(values: torch.Tensor) -> memoryview:
    return values.contiguous().view(-1).view(torch.uint8).numpy().data


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    try:
        if options.command == "import":
            said = _import(options)
        else:
            said = _export(options)
    except (ValueError, OSError, manifest.BadCheckpoint) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(said) + "\n")
    return 0


def _import(options: argparse.Namespace) -> dict[str, Any]:
    document = import_(
        options.uri,
        options.root,
        options.job,
        seq_len=options.seq_len,
        stored_as=options.stored_as,
        dtype=options.dtype,
        optimizer=options.optimizer,
    )
    return {"manifest": document.path, "model": dict(document.model)}


def _export(options: argparse.Namespace) -> dict[str, Any]:
    from workers.models import adapters

    home, found, name = options.manifest.rpartition(f"/{manifest.MANIFESTS}/")
    if not found:
        raise ValueError(f"{options.manifest} is no manifest of a job: ROOT/JOB/{manifest.MANIFESTS}/STEP-ATTEMPT.json")
    storage = Storage.open(home)
    document = manifest.load(storage, f"{manifest.MANIFESTS}/{name}")
    adapters.export(storage, document, options.folder, dtype=options.dtype, adapter=options.adapter)
    return {"folder": options.folder, "step": document.step}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m workers.models.huggingface",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    take = commands.add_parser("import", help="a folder's model becomes step 0 of a job")
    take.add_argument("uri", help="folder of config.json and safetensors: a path or fsspec URI")
    take.add_argument("--root", required=True, help="storage root: a path or fsspec URI")
    take.add_argument("--job", required=True, help="name of the run under the root")
    take.add_argument("--seq-len", type=int, help="tokens a sample; default all positions the model was made for")
    take.add_argument("--stored-as", help="dtype that every tensor there must have; default as config.json says")
    take.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of the job's parameters")
    take.add_argument("--optimizer", choices=tuple(STATE), default="adamw", help="that the job will use")
    give = commands.add_parser("export", help="a checkpoint's model becomes a folder")
    give.add_argument("manifest", help="ROOT/JOB/manifests/STEP-ATTEMPT.json")
    give.add_argument("folder", help="a new folder: a path or fsspec URI")
    give.add_argument("--dtype", choices=("float64", "float32", "bfloat16", "float16"), help="default as stored")
    give.add_argument("--adapter", action="store_true", help="the adapters alone, as PEFT has them")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
