from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from service.runtime.lanes import Lanes

DEADLINE_S = 10.0


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes(4)
    yield made
    made.close()


def drain(lanes: Lanes, *keys: str) -> None:
    """Until all that was submitted under `keys` up to now is done."""
    for key in keys:
        done = threading.Event()
        lanes.submit(key, done.set)
        assert done.wait(DEADLINE_S)


def wait(begun: threading.Event, go_on: threading.Event) -> None:
    begun.set()
    assert go_on.wait(DEADLINE_S)


def fail() -> None:
    raise ZeroDivisionError


def test_one_key_in_order_and_one_at_a_time(lanes: Lanes) -> None:
    seen: list[int] = []
    inside = threading.Lock()

    def work(number: int) -> None:
        assert inside.acquire(blocking=False), "two at a time"
        seen.append(number)
        inside.release()

    for number in range(200):
        lanes.submit("a", lambda number=number: work(number))  # type: ignore[misc]
    drain(lanes, "a")
    assert seen == list(range(200))


def test_keys_side_by_side(lanes: Lanes) -> None:
    meeting = threading.Barrier(4)
    met: list[int] = []
    for key in "abcd":
        lanes.submit(key, lambda: met.append(meeting.wait(DEADLINE_S)))
    drain(lanes, *"abcd")
    assert sorted(met) == [0, 1, 2, 3]


def test_busy_while_work_runs_or_waits(lanes: Lanes) -> None:
    begun, go_on = threading.Event(), threading.Event()
    assert not lanes.busy("a")
    lanes.submit("a", lambda: wait(begun, go_on))
    assert begun.wait(DEADLINE_S)
    assert (lanes.busy("a"), lanes.busy("b")) == (True, False)
    go_on.set()
    lanes.pool.shutdown(wait=True)
    assert not lanes.busy("a")


def test_work_may_submit_to_its_own_lane_and_to_others(lanes: Lanes) -> None:
    seen: list[str] = []
    last = threading.Event()

    def first() -> None:
        lanes.submit("a", lambda: seen.append("third"))
        lanes.submit("b", lambda: seen.append("second"))
        drain(lanes, "b")
        lanes.submit("a", last.set)

    lanes.submit("a", first)
    assert last.wait(DEADLINE_S)
    assert seen == ["second", "third"]


def test_work_that_raises_is_logged_and_its_lane_goes_on(lanes: Lanes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "phalanx.lanes"):
        lanes.submit("job-1", fail)
        drain(lanes, "job-1")
    (record,) = caplog.records
    assert "job-1" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_after_close_nothing_more_begins(lanes: Lanes) -> None:
    begun, go_on, seen = threading.Event(), threading.Event(), list[str]()
    lanes.submit("a", lambda: wait(begun, go_on))
    lanes.submit("a", lambda: seen.append("waited"))
    assert begun.wait(DEADLINE_S)
    lanes.close()
    lanes.submit("a", lambda: seen.append("late"))
    lanes.submit("b", lambda: seen.append("late"))
    go_on.set()
    lanes.pool.shutdown(wait=True)
    assert seen == []
