"""Retries, in virtual time."""

from __future__ import annotations

import dataclasses
import errno
import io
import threading

import pytest

from workers.checkpoint.retry import Retry, may_pass


@dataclasses.dataclass
class World:
    """A clock that only waiting moves, and work that fails until a moment."""

    fails_until: float
    error: BaseException
    now: float = 0.0
    work_s: float = 0.0  # that each try takes
    stop_at: float = float("inf")
    tries: list[float] = dataclasses.field(default_factory=list)

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        if self.now + seconds >= self.stop_at:
            self.now = max(self.now, self.stop_at)
            stop.set()
        else:
            self.now += seconds
        return stop.is_set()

    def work(self) -> str:
        self.tries.append(self.now)
        self.now += self.work_s
        if self.now < self.fails_until:
            raise self.error
        return "done"

    def retry(self, deadline_s: float, jitter: float = 0.0, **pauses: float) -> Retry:
        return Retry(deadline_s, clock=lambda: self.now, wait=self.wait, jitter=lambda: jitter, **pauses)


AWAY = OSError(errno.EIO, "away")


@pytest.mark.parametrize(
    ("jitter", "first_s", "most_s", "expected"),
    [
        (0.0, 0.5, 15.0, [0, 0.5, 1.5, 3.5, 7.5, 15.5, 30.5, 45.5]),
        (0.0, 2.0, 2.0, [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40]),
        (1.0, 4.0, 16.0, [0, 2, 6, 14, 22, 30, 38, 46]),
    ],
)
def test_pauses_double_up_to_the_most(jitter, first_s, most_s, expected):
    world = World(40.0, AWAY)
    assert world.retry(100.0, jitter, first_s=first_s, most_s=most_s).run(world.work) == "done"
    assert world.tries == expected


def test_the_last_try_is_at_the_deadline():
    world = World(1000.0, AWAY)
    with pytest.raises(OSError, match="away"):
        world.retry(10.0).run(world.work)
    assert world.tries == [0, 0.5, 1.5, 3.5, 7.5, 10.0]


def test_work_that_takes_longer_than_the_deadline_is_not_tried_again():
    world = World(1000.0, AWAY, work_s=20.0)
    with pytest.raises(OSError, match="away"):
        world.retry(10.0).run(world.work)
    assert world.tries == [0]


def test_stop_ends_a_pause_with_the_last_error():
    world = World(1000.0, AWAY, stop_at=2.0)
    with pytest.raises(OSError, match="away"):
        world.retry(100.0).run(world.work, threading.Event())
    assert (world.tries, world.now) == ([0, 0.5, 1.5], 2.0)


def test_a_stop_that_is_set_leaves_one_try():
    stop, world = threading.Event(), World(1000.0, AWAY)
    stop.set()
    with pytest.raises(OSError, match="away"):
        world.retry(100.0).run(world.work, stop)
    assert world.tries == [0]


def test_a_real_stop_interrupts_a_real_pause():
    stop, failed = threading.Event(), threading.Event()

    def work() -> None:
        failed.set()
        raise AWAY

    def run() -> None:
        with pytest.raises(OSError, match="away"):
            Retry(3600.0, first_s=3600.0, most_s=3600.0).run(work, stop)

    thread = threading.Thread(target=run)
    thread.start()
    assert failed.wait(10)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TimeoutError("slow"), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (ConnectionError("no such host"), True),
        (OSError(errno.EIO, "input or output"), True),
        (OSError(errno.EREMOTEIO, "internal error"), True),
        (OSError(errno.EBUSY, "slow down"), True),
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EDQUOT, "quota"), True),
        (OSError(errno.ESTALE, "stale handle"), True),
        (PermissionError("token expired"), True),
        (OSError("unknown"), True),
        (FileExistsError("there"), False),
        (FileNotFoundError("not there"), False),
        (NotADirectoryError("a file"), False),
        (IsADirectoryError("a folder"), False),
        (OSError(errno.EINVAL, "bad name"), False),
        (OSError(errno.ENAMETOOLONG, "long name"), False),
        (io.UnsupportedOperation("read only"), False),
    ],
)  # fmt: skip
def test_what_may_pass(error, passes):
    assert may_pass(error) == passes
    world = World(1.0, error)
    if passes:
        assert world.retry(100.0).run(world.work) == "done"
    else:
        with pytest.raises(type(error)):
            world.retry(100.0).run(world.work)
    assert len(world.tries) == (3 if passes else 1)


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyError("missing"), KeyboardInterrupt()])
def test_what_is_no_trouble_of_storage_is_not_tried_again(error):
    world = World(1.0, error)
    with pytest.raises(type(error)):
        world.retry(100.0).run(world.work)
    assert world.tries == [0]


@pytest.mark.parametrize("pauses", [{"first_s": 0.0}, {"first_s": 20.0}])
def test_pauses_that_make_no_sense_are_refused(pauses):
    with pytest.raises(ValueError, match="first pause"):
        Retry(10.0, **pauses)
