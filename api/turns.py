"""A job followed by looking again: what is new of it since a cursor. Knows the client, and nothing of who looks on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator

from api.client import POLL_S, Client
from api.views import EventView, MetricsPage, StepView
from api.wire import Patience
from service.contracts import errors
from service.contracts.status import JobView


@dataclasses.dataclass(frozen=True, slots=True)
class Cursor:
    """The last that was seen. Steps are told in order and once each, so one that was done again is not seen again."""

    event: int = 0
    step: int = 0
    evaluated: int = -1  # the last step after which there was an evaluation


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """`events` and `steps` are what is new; `cursor` is after them. `evaluations`: those of the events that tell of an
    evaluation, but for what an attempt told again."""

    job: JobView
    events: tuple[EventView, ...]
    evaluations: tuple[EventView, ...]
    steps: tuple[StepView, ...]
    cursor: Cursor

    @property
    def last(self) -> bool:
        """The job is over, and there was nothing new."""
        return self.job.phase.terminal and not self.events and not self.steps


def look(client: Client, uid: str, after: Cursor, figures: bool = True) -> Turn:
    """One page of each, of steps only with `figures`."""
    job = client.get(uid)  # before its events: the last ones of a terminal job are read after it
    events = client.events_page(uid, after.event)
    evaluations = tuple(_new(events.events, after.evaluated))
    evaluated = evaluations[-1].data["step"] if evaluations else after.evaluated
    # after its events: the steps that they tell of are there
    steps = client.metrics_page(uid, after.step) if figures else MetricsPage(steps=(), after_step=after.step)
    return Turn(job, events.events, evaluations, steps.steps, Cursor(events.after, steps.after_step, evaluated))


def _new(events: Iterable[EventView], evaluated: int) -> Iterator[EventView]:
    for event in events:
        if event.type == "Evaluated" and event.data["step"] > evaluated:
            evaluated = event.data["step"]
            yield event


def each(
    client: Client, uid: str, patience_s: float, figures: bool = True, after: Cursor | None = None
) -> Iterator[Turn]:
    """Turns up to the one in which the job is over and all is told. An API that is away is waited for, so long."""
    cursor, patience = after or Cursor(), Patience(patience_s)
    while True:
        try:
            turn = look(client, uid, cursor, figures)
        except errors.ClusterError as error:
            patience.lose(error, time.monotonic())
        else:
            patience.found()
            cursor = turn.cursor
            yield turn
            if turn.last:
                return
            if turn.events or turn.steps:
                continue
        time.sleep(POLL_S)
