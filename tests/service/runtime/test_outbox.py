from __future__ import annotations

import pytest

from service.runtime.outbox import Outbox
from workers import reports

pytestmark = pytest.mark.ray


def test_words_are_kept_in_order_until_they_are_confirmed() -> None:
    outbox = Outbox()
    for word in ("a", "b", "c"):
        outbox.say(1, word)
    assert outbox.waiting() == [(1, [(1, "a"), (2, "b"), (3, "c")])]
    outbox.confirm(1, 2)
    assert outbox.of(1) == ((3, "c"),)
    outbox.confirm(1, 3)
    assert outbox.waiting() == []


def test_the_words_of_an_earlier_attempt_come_first_and_are_confirmed_apart() -> None:
    outbox = Outbox()
    outbox.say(2, "new")
    outbox.say(1, "late")
    assert [attempt for attempt, _ in outbox.waiting()] == [1, 2]
    outbox.confirm(2, 1)
    assert outbox.waiting() == [(1, [(2, "late")])]


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ([reports.Moved(0, "step", 1, 0.0), reports.Moved(0, "step", 2, 0.0)], [1]),
        ([reports.Moved(0, "step", 1, 0.0), reports.Moved(1, "step", 1, 0.0)], [0, 1]),
        ([reports.SnapshotTaken(1, 0, 8, 0.0), reports.SnapshotTaken(2, 0, 8, 0.0)], [1]),
        ([reports.Moved(0, "step", 1, 0.0), reports.SnapshotTaken(1, 0, 8, 0.0)], [0, 1]),
        ([reports.Resumed(1, None), reports.Resumed(2, None)], [0, 1]),
    ],
)
def test_of_some_reports_only_the_newest_of_a_rank_is_kept(said: list[reports.Report], left: list[int]) -> None:
    outbox = Outbox()
    for word in said:
        outbox.say(1, word)
    assert [word for _, word in outbox.of(1)] == [said[index] for index in left]


@pytest.mark.parametrize(("now", "wakes"), [(True, True), (False, False)])
def test_what_cannot_wait_wakes_who_delivers(now: bool, wakes: bool) -> None:
    outbox = Outbox()
    outbox.say(1, "word", now)
    assert outbox.wake.is_set() == wakes
