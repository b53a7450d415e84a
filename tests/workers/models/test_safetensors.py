"""The file format against the library of its name, both ways; and files that are not whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as library

from workers.checkpoint.storage import Storage
from workers.models import safetensors
from workers.models.safetensors import BadFile, Source

ARRAYS = {
    "matrix": np.arange(15, dtype=np.float32).reshape(5, 3),
    "vector": np.array([1, -2, 3], dtype=np.int64),
    "half": np.array([[0.5], [np.inf]], dtype=np.float16),
}


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage.open(str(tmp_path))


def source(name: str, array: np.ndarray) -> Source:
    return Source(name, str(array.dtype), array.shape, array.tobytes)


def test_the_library_reads_what_is_written(storage: Storage, tmp_path: Path) -> None:
    safetensors.write(storage, "sub/a.safetensors", [source(*item) for item in ARRAYS.items()])
    found = library.load_file(tmp_path / "sub/a.safetensors")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def test_what_the_library_writes_is_read(storage: Storage, tmp_path: Path) -> None:
    library.save_file(ARRAYS, tmp_path / "a.safetensors", metadata={"format": "pt"})
    found = safetensors.entries(storage, "a.safetensors")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (str(array.dtype), array.shape)
        assert found[name].read(0, len(array)) == array.tobytes()
    assert found["matrix"].read(1, 2) == ARRAYS["matrix"][1:3].tobytes()


def test_bytes_must_fill_the_tensor(storage: Storage) -> None:
    with pytest.raises(ValueError, match="x: 4 bytes for a tensor of 8"):
        safetensors.write(storage, "a.safetensors", [Source("x", "float32", (2,), lambda: bytes(4))])
    assert not storage.exists("a.safetensors")


def file(header: object, data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def tensor(**changes: object) -> dict[str, object]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "a header of 0 bytes in a file of 0"),
        (b"\xff" * 16, "a header of 18446744073709551615 bytes in a file of 16"),
        (file(b"{oh"), "its header is malformed (JSONDecodeError"),
        (file([1]), "its header is malformed (AttributeError"),
        (file({"x": {}}), "its header is malformed (KeyError('data_offsets'))"),
        (file(tensor(dtype="F3"), bytes(8)), "its header is malformed (KeyError('F3'))"),
        (file(tensor(shape=[3]), bytes(8)), "its header is malformed (ValueError(\"x is {'dtype'"),
        (file(tensor(data_offsets=[-8, 0])), "its header is malformed (ValueError(\"x is {'dtype'"),
        (file(tensor(), bytes(7)), "bytes where its header speaks of"),
        (file(tensor(), bytes(9)), "bytes where its header speaks of"),
    ],
)
def test_files_that_are_not_whole(storage: Storage, content: bytes, why: str) -> None:
    storage.create("a.safetensors", content)
    with pytest.raises(BadFile) as caught:
        safetensors.entries(storage, "a.safetensors")
    assert str(caught.value).startswith("a.safetensors is no whole safetensors file: ")
    assert why in str(caught.value)


def test_a_file_cut_after_it_was_opened(storage: Storage, tmp_path: Path) -> None:
    storage.create("a.safetensors", file(tensor(), bytes(8)))
    entry = safetensors.entries(storage, "a.safetensors")["x"]
    (tmp_path / "a.safetensors").write_bytes(file(tensor(), bytes(6)))
    assert entry.read(0, 1) == bytes(4)
    with pytest.raises(BadFile, match="it ended while rows 0 to 2 of a tensor were read"):
        entry.read(0, 2)
