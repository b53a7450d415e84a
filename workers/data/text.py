"""Documents of a file: plain text, JSON lines, Parquet; the first two compressed too. Torch-free."""

from __future__ import annotations

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
    place, suffixes = _place(uri), PurePosixPath(uri).suffixes
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    try:
        if suffixes[-1:] == [PARQUET]:
            yield from _rows(uri, field, place)
            return
        with fsspec.open(uri, "rt", encoding="utf-8", compression="infer") as stream:
            if suffixes[-1:] and suffixes[-1] in JSON_LINES:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield _text(line, field, f"{place}:{number}")
            else:
                yield stream.read()
    except FileNotFoundError:
        raise DataError(f"{place} does not exist; data.source may be builtin:topics, a path or a URI") from None
    except IsADirectoryError:
        raise DataError(f"{place} is a folder; name its files, as in {place}/*.txt") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8 text (byte {error.start}: {error.reason})") from None


def _place(uri: str) -> str:
    return uri.removeprefix("file://")


def _text(line: str, field: str, place: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place} is not JSON: {error.msg}; one JSON object a line is wanted") from None
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        raise DataError(f"{place} has no text under {field!r}; name the field by data.text_field")
    return whole(value[field])


def _rows(uri: str, field: str, place: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with fsspec.open(uri, "rb") as file:
        try:
            opened: Any = pq.ParquetFile(file)
        except pa.ArrowInvalid as error:
            raise DataError(f"{place} is no Parquet file: {error}") from None
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
