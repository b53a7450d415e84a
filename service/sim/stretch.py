"""The steps of one attempt from where it continued, in closed form: steps are not events.

After a step whose number is a multiple of `every` the ranks are blocked for a stall, a snapshot's or a checkpoint's,
before the next step begins; what was saved is whole when the stall is over.
"""

from __future__ import annotations

import bisect
import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Stall:
    every: int  # steps; 0: never
    us: int


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Microseconds since the stretch began, by what they were spent on."""

    again: int = 0  # on steps that were completed before
    fresh: int = 0  # on steps that were not, the unfinished one included
    stalled: int = 0

    def __sub__(self, other: Parts) -> Parts:
        return Parts(self.again - other.again, self.fresh - other.fresh, self.stalled - other.stalled)


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    first: int  # the step that it continued after
    begun: int  # microseconds, when step first + 1 begins
    high: int  # the highest step ever completed before
    step_us: int
    stalls: tuple[Stall, ...] = ()

    def begins(self, step: int) -> int:
        """When a step begins."""
        return self.begun + (step - 1 - self.first) * self.step_us + self._stalled(step - 1)

    def completes(self, step: int) -> int:
        return self.begins(step) + self.step_us

    def completed(self, at: int) -> int:
        """The last step completed by then."""
        most = max(0, at - self.begun) // self.step_us
        return self.first + bisect.bisect_right(range(1, most + 1), at, key=lambda n: self.completes(self.first + n))

    def held(self, at: int, every: int) -> int | None:
        """The newest step of a multiple of `every` whose state was saved in this stretch by then."""
        if not every:
            return None
        done = self.completed(at)
        if self.begins(done + 1) > at:
            done -= 1
        newest = done // every * every
        return newest if newest > self.first else None

    def unfinished(self, at: int) -> int:
        """Microseconds spent on a new step that is not completed by then."""
        step = self.completed(at) + 1
        return max(0, at - self.begins(step)) if step > self.high else 0

    def parts(self, at: int) -> Parts:
        done = self.completed(at)
        worked = (done - self.first) * self.step_us + max(0, at - self.begins(done + 1))
        again = min(worked, max(0, self.high - self.first) * self.step_us)
        return Parts(again, worked - again, at - self.begun - worked)

    def _stalled(self, last: int) -> int:
        """Of the stalls after steps first + 1 to `last`."""
        return sum(s.us * (last // s.every - self.first // s.every) for s in self.stalls if s.every)
