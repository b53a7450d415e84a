"""Where every second of every slot goes, counted once: in whole slot-microseconds, so that the parts sum exactly.

Two books. `clock` is the job's: its own seconds from submission to the end. `slots` is the fleet's: slots times
seconds. Of the slots alive a job can use as many as it was meant for at most, the rest is spare. What a slot could have
done is its share of a step under the layout that the job wants; a smaller layout that uses its slots better than that
one is a negative loss, and slots that a policy leaves idle are a loss of a layout that is too small.
"""

from __future__ import annotations

import dataclasses
import enum
from fractions import Fraction

from service.sim.stretch import Parts


class Use(enum.StrEnum):
    """What a second was for. The first is useful, the next ones are losses of the job, the last two the fleet's."""

    USEFUL = "useful"
    DETECTION = "detection"
    RESTART = "restart"
    REDONE = "redone"
    SMALLER = "smaller_layout"
    WAITING = "waiting"
    SNAPSHOTS = "snapshots"
    SPARE = "spare"
    DOWN = "down"


LOSSES = (Use.DETECTION, Use.RESTART, Use.REDONE, Use.SMALLER, Use.WAITING, Use.SNAPSHOTS)


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Nothing changed in it."""

    start: int
    end: int
    use: Use  # USEFUL: the gang steps
    attempt: int
    alive: int  # slots
    ranks: int  # of the gang


class Ledger:
    def __init__(self, total: int, wanted: int, room: int | None = None) -> None:
        """Slots of the fleet, those of the layout that the job wants, and those that it could use: as many if None."""
        self.total, self.wanted, self.room = total, wanted, room or wanted
        self.clock = dict.fromkeys(Use, 0)
        self.slots = dict.fromkeys(Use, 0)
        self.spans: list[Span] = []

    def idle(self, span: Span) -> None:
        """The gang makes no step, for the reason `span.use`."""
        spent = span.end - span.start
        self.clock[span.use] += spent
        self.slots[span.use] += self._usable(span) * spent

    def worked(self, span: Span, parts: Parts, speed: Fraction) -> None:
        """The gang steps, with `speed` times the rate of the layout that the job wants."""
        usable, spent = self._usable(span), span.end - span.start
        for use, part in ((Use.USEFUL, parts.fresh), (Use.REDONE, parts.again)):
            self.clock[use] += part
            self.slots[use] += self._done(part, speed)
        self.clock[Use.SNAPSHOTS] += parts.stalled
        self.slots[Use.SNAPSHOTS] += usable * parts.stalled
        stepping = self._done(parts.fresh, speed) + self._done(parts.again, speed)
        self.slots[Use.SMALLER] += usable * (spent - parts.stalled) - stepping

    def lost(self, fresh: int, speed: Fraction) -> None:
        """So much of the last stretch was for a step that will not be completed."""
        for book, part in ((self.clock, fresh), (self.slots, self._done(fresh, speed))):
            book[Use.USEFUL] -= part
            book[Use.REDONE] += part

    def _done(self, us: int, speed: Fraction) -> int:
        return us * self.wanted * speed.numerator // speed.denominator

    def _usable(self, span: Span) -> int:
        usable, spent = min(span.alive, self.room), span.end - span.start
        self.slots[Use.SPARE] += (span.alive - usable) * spent
        self.slots[Use.DOWN] += (self.total - span.alive) * spent
        self.spans.append(span)
        return usable
