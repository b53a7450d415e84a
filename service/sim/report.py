"""What a simulation says: goodput, where the time went, what it took. As one mapping, for people, and as CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections import Counter
from typing import Any

from service.core.goodput import goodput
from service.sim import clock
from service.sim.ledger import LOSSES, Use
from service.sim.simulate import Result

COLUMNS = ("start_s", "end_s", "use", "attempt", "slots_alive", "ranks")


def figures(result: Result) -> dict[str, Any]:
    """Shares are of the fleet's slot-seconds and sum to 1; seconds are the job's own and sum to `elapsed_s`.

    `goodput` is the job's: its steps' own time over its time. `goodput_fleet` counts all slots of the fleet, also those
    that are down and spare, and a step of a smaller layout as what it is worth; `goodput_available` only those slots
    alive that the job could use.
    """
    job, ledger = result.job, result.ledger
    whole = sum(ledger.slots.values())
    usable = whole - ledger.slots[Use.DOWN] - ledger.slots[Use.SPARE]
    useful = ledger.slots[Use.USEFUL]
    over = [one for one in job.incidents if one.recover_s is not None]
    return {
        "phase": job.phase.value,
        "reason": job.reason,
        "elapsed_s": clock.seconds(result.end),
        "steps": job.high_step,
        "goodput": goodput(job.productive_s, 0.0, clock.seconds(result.end)),
        "goodput_fleet": useful / whole if whole else 0.0,
        "goodput_available": useful / usable if usable else 0.0,
        "shares": {use.value: ledger.slots[use] / whole if whole else 0.0 for use in Use},
        "loss_available": {use.value: ledger.slots[use] / usable if usable else 0.0 for use in LOSSES},
        "seconds": {use.value: clock.seconds(ledger.clock[use]) for use in Use if use in _CLOCK},
        "attempts": job.attempt,
        "incidents": dict(Counter(one.kind for one in job.incidents)),
        "recover_s": statistics.median(one.recover_s or 0.0 for one in over) if over else None,
        "from_memory": result.from_memory,
        "grown": result.grown,
    }


def as_csv(result: Result) -> str:
    """A row for each span in which nothing changed."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(COLUMNS)
    for span in result.ledger.spans:
        start, end = clock.seconds(span.start), clock.seconds(span.end)
        rows.writerow((start, end, span.use.value, span.attempt, span.alive, span.ranks))
    return out.getvalue()


_CLOCK = (Use.USEFUL, Use.DETECTION, Use.RESTART, Use.REDONE, Use.WAITING, Use.SNAPSHOTS)
