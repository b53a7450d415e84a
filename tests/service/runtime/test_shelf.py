from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from service.runtime.shelf import Elsewhere, Reach
from workers.checkpoint.storage import Storage

pytestmark = pytest.mark.ray

DATA = bytes(range(100))


class Peer(Elsewhere):
    """Another node's memory, as a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__("job", "phalanx", {})
        self.folder = Storage.open(str(folder))

    def _ask(self, question: str, path: str, *arguments: object) -> object:
        return getattr(self.folder, question)(path, *arguments)


def filled(storage: Storage, path: str) -> bytes:
    out = bytearray(10)
    count = storage.read_into(path, 20, memoryview(out))
    return bytes(out[:count])


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda storage, path: storage.read(path), DATA),
        (lambda storage, path: storage.read(path, 20, 30), DATA[20:30]),
        (filled, DATA[20:30]),
        (lambda storage, path: storage.size(path), 100),
    ],
    ids=["read", "a range", "read_into", "size"],
)
@pytest.mark.parametrize("here", [True, False], ids=["here", "elsewhere"])
def test_all_that_is_asked_of_a_file_is_answered_by_a_node_that_has_it(
    tmp_path: Path, here: bool, ask: Callable[[Storage, str], object], answer: object
) -> None:
    Storage.open(str(tmp_path / ("here" if here else "there"))).create("steps/a.bin", DATA)
    reach = Reach.of(tmp_path / "here", Peer(tmp_path / "there"))
    assert ask(reach, "steps/a.bin") == answer
    with pytest.raises(FileNotFoundError):
        ask(reach, "steps/none.bin")
