from __future__ import annotations

from pathlib import Path

import pytest

from service.runtime import hands
from workers.checkpoint.storage import Storage

pytestmark = pytest.mark.ray

NAMES = [f"manifests/{step:010d}-000001.json" for step in (30, 20, 10)]


def storage(root: Path, *names: str) -> Storage:
    made = Storage.open(str(root))
    for name in names:
        made.create(name, b"{}")
    return made


@pytest.mark.parametrize(
    ("there", "newest", "rejected", "found"),
    [
        ([], None, (), ()),
        (NAMES, None, (), tuple(NAMES)),  # published, and the word of it lost
        (NAMES, NAMES[0], (), tuple(NAMES)),
        (NAMES[1:], NAMES[0], (), tuple(NAMES[1:])),
        (NAMES, NAMES[1], (NAMES[0],), tuple(NAMES[1:])),
        (NAMES, None, tuple(NAMES), ()),  # all of them were bad: from the seed
    ],
)
def test_what_may_be_continued_at(
    tmp_path: Path, there: list[str], newest: str | None, rejected: tuple[str, ...], found: tuple[str, ...]
) -> None:
    assert hands.resumable(storage(tmp_path, *there), newest, rejected) == found


def test_no_more_than_a_few_are_walked_back_over(tmp_path: Path) -> None:
    names = [f"manifests/{step:010d}-000001.json" for step in range(20)]
    assert hands.resumable(storage(tmp_path, *names), None, ()) == tuple(reversed(names))[: hands.RESUME_FROM]


def test_storage_that_lost_all_is_not_a_new_beginning(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="holds no checkpoint: is it mounted"):
        hands.resumable(storage(tmp_path / "job"), NAMES[0], ())
    (tmp_path / "job").write_text("a file")
    with pytest.raises(NotADirectoryError):
        hands.resumable(storage(tmp_path / "job"), None, ())
