"""Tries again what may pass by itself: storage that is away, full, slow, or asks for newer credentials.

Knows OSErrors, as every storage raises them; not who writes what.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

LASTING = (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError, io.UnsupportedOperation)
LASTING_NUMBERS = {
    errno.EINVAL, errno.ENAMETOOLONG, errno.EFBIG, errno.EMSGSIZE, errno.ELOOP, errno.EXDEV, errno.ENOSYS,
    errno.ENOTSUP, errno.EOPNOTSUPP,
}  # fmt: skip

T = TypeVar("T")


def may_pass(error: OSError) -> bool:
    """Whether the same call may do better later. So may one that isn't known: to wait in vain costs a deadline, not to
    wait costs a checkpoint. A full disk is made room on; a refusal ends with the next credentials.
    """
    return not isinstance(error, LASTING) and error.errno not in LASTING_NUMBERS


@dataclasses.dataclass(frozen=True, slots=True)
class Retry:
    """Pauses that double from `first_s` up to `most_s`, each cut by up to a half at random so that the ranks of a job
    don't come all at once; the last try is at the deadline.
    """

    deadline_s: float
    first_s: float = 0.5
    most_s: float = 15.0
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait  # whether the event was set by then
    jitter: Callable[[], float] = random.random  # in [0, 1)

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.most_s:
            raise ValueError(
                f"the first pause of {self.first_s} s must be above 0 and not above the most, {self.most_s} s"
            )

    def run(self, work: Callable[[], T], stop: threading.Event | None = None) -> T:
        """What `work` gives, in the end; the last OSError where none may pass any more, the deadline is over, or `stop`
        is set, which ends a pause at once.
        """
        stop, end, pause = stop or threading.Event(), self.clock() + self.deadline_s, self.first_s
        while True:
            try:
                return work()
            except OSError as error:
                left = end - self.clock()
                if not may_pass(error) or left <= 0 or stop.is_set():
                    raise
                if self.wait(stop, min(left, pause * (1 - self.jitter() / 2))):
                    raise
            pause = min(self.most_s, 2 * pause)
