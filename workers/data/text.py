"""Documents of a file: plain text, JSON lines, Parquet; the first two compressed too. Torch-free."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import fsspec

JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = ".parquet"
COMPRESSED = (".gz", ".bz2", ".xz")


class DataError(ValueError):
    """The data can't be trained on as the spec says; the message says what would work."""


def files(source: str) -> list[str]:
    """The files that a path, glob or URI stands for, sorted; as URIs that `documents` opens."""
    fs, paths = fsspec.core.url_to_fs(source)[0], [one.path for one in fsspec.open_files(source)]
    if not paths:
        raise DataError(
            f"{source} matches no file; use builtin:topics, or a path or URI of text, JSON lines or Parquet"
        )
    return [str(fs.unstrip_protocol(path)) for path in sorted(map(str, paths))]


def documents(uri: str, field: str) -> Iterator[str]:
    """In the order of the file. DataError says where what is wrong."""
    place, kind = _place(uri), _kind(uri)
    with _readable(place):
        if kind == PARQUET:
            yield from _rows(uri, field, place)
        elif kind in JSON_LINES:
            for where, value in _objects(uri, place):
                if not isinstance(value.get(field), str):
                    raise DataError(f"{where} has no text under {field!r}; name the field by data.text_field")
                yield whole(value[field])
        else:
            with fsspec.open(uri, "rt", encoding="utf-8", compression="infer") as stream:
                yield stream.read()


def records(uri: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it is, fields) of each row of JSON lines or Parquet. DataError says where what is wrong."""
    place, kind = _place(uri), _kind(uri)
    if kind != PARQUET and kind not in JSON_LINES:
        raise DataError(f"{place} has no fields: JSON lines (.jsonl) or Parquet is wanted")
    with _readable(place):
        yield from _table(uri, place) if kind == PARQUET else _objects(uri, place)


def _kind(uri: str) -> str:
    suffixes = PurePosixPath(uri).suffixes
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


@contextlib.contextmanager
def _readable(place: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{place} does not exist; data.source may be builtin:topics, a path or a URI") from None
    except IsADirectoryError:
        raise DataError(f"{place} is a folder; name its files, as in {place}/*.txt") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8 text (byte {error.start}: {error.reason})") from None


def _place(uri: str) -> str:
    return uri.removeprefix("file://")


def _objects(uri: str, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with fsspec.open(uri, "rt", encoding="utf-8", compression="infer") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield f"{place}:{number}", _object(line, f"{place}:{number}")


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place} is not JSON: {error.msg}; one JSON object a line is wanted") from None
    return value if isinstance(value, dict) else {}


def _table(uri: str, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with _parquet(uri, place) as opened:
        number = 0
        for batch in opened.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{place}, row {number}", row


@contextlib.contextmanager
def _parquet(uri: str, place: str) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with fsspec.open(uri, "rb") as file:
        try:
            opened = pq.ParquetFile(file)
        except pa.ArrowInvalid as error:
            raise DataError(f"{place} is no Parquet file: {error}") from None
        yield opened


def _rows(uri: str, field: str, place: str) -> Iterator[str]:
    import pyarrow as pa

    with _parquet(uri, place) as opened:
        schema = opened.schema_arrow
        if field not in schema.names or not (
            pa.types.is_string(schema.field(field).type) or pa.types.is_large_string(schema.field(field).type)
        ):
            known = ", ".join(schema.names)
            raise DataError(f"{place} has no column of text called {field!r}, but {known}; name it by data.text_field")
        for batch in opened.iter_batches(batch_size=1024, columns=[field]):
            for value in batch.column(0):
                if (text := value.as_py()) is not None:
                    yield text


def whole(text: str) -> str:
    """Without halves of surrogate pairs, which JSON may hold."""
    return str(text.encode("utf-8", "replace"), "utf-8")
