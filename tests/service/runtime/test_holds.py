from __future__ import annotations

import time
from pathlib import Path

import pytest

from service.runtime import holds
from workers.checkpoint import manifest, retention
from workers.checkpoint.storage import Storage

pytestmark = pytest.mark.ray

PATH = manifest.path(4, 1)


def test_what_is_held_is_known_to_retention_until_the_end(tmp_path: Path) -> None:
    storage = Storage.open(str(tmp_path))
    storage.create(PATH, b"{}")
    with holds.held(storage, PATH):
        assert retention.held(storage, time.time()) == {PATH}
        assert retention.held(storage, time.time() + holds.HOLD_S + 1) == set()
    assert retention.held(storage, time.time()) == set()


def test_what_is_not_there_can_not_be_held_and_no_folder_is_made(tmp_path: Path) -> None:
    storage = Storage.open(str(tmp_path / "not-mounted"))
    with pytest.raises(FileNotFoundError, match="storage not mounted"), holds.held(storage, PATH):
        pass
    assert not (tmp_path / "not-mounted").exists()
