"""What a tracker is, and what it is told of a job. Knows no library."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

from api.turns import Cursor, Turn
from api.views import EventView, StepView
from service.contracts import errors
from service.contracts.status import JobView

T = TypeVar("T")

FIGURES = {
    # as the API has it: as trackers do
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "tokens_per_s": "train/tokens_per_s",
    "step_s": "train/step_s",
    "mfu": "train/mfu",
}
EVALUATION, INCIDENTS = "eval/loss", "incidents"


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """Figures after `step`, measured at `at` (Unix seconds)."""

    step: int
    at: float
    values: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """What happened to the job at `step`, in words."""

    step: int
    at: float
    title: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """What is new; once it is written the run stands at `cursor`."""

    points: tuple[Point, ...]
    marks: tuple[Mark, ...]
    cursor: Cursor


class Tracker(Protocol):
    """One run of one job. Raises ClusterError where it does not answer, UserError where it never will."""

    def begin(self, job: JobView) -> Cursor:
        """Open the job's run or take it up again, and say where it stands."""

    def write(self, batch: Batch) -> None:
        """All of it, and the cursor after it: what a cut leaves out, or may have, is written again."""

    def end(self, job: JobView | None) -> None:
        """`job` is over; None: it is followed no longer."""


def batch(turn: Turn) -> Batch:
    points = [_point(step) for step in turn.steps]
    points += [Point(event.data["step"], event.at, _evaluation(event.data)) for event in turn.evaluations]
    marks = []
    for event in turn.events:
        match event.type:
            case "IncidentOpened":
                points.append(Point(event.data["step"], event.at, {INCIDENTS: event.data["number"]}))
                marks.append(_mark(event, f"incident {event.data['number']}"))
            case "IncidentClosed":
                marks.append(_mark(event, f"incident {event.data['number']} over"))
    return Batch(tuple(points), tuple(marks), turn.cursor)


def library(module: str, extra: str) -> Any:
    """An optional library. UserError: it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # it is there, and does not work
        hint = f"pip install 'phalanx[{extra}]'"
        raise errors.UserError(f"{module.partition('.')[0]} is not installed", hint=hint) from None


def shared(spec: dict[str, Any]) -> dict[str, Any]:
    """Without the environment of the ranks, which is no one else's business."""
    return {name: value for name, value in spec.items() if name != "runtime"}


def flat(spec: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of each field."""
    for name, value in spec.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def parts(rows: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The rows, so many at a time."""
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def _point(step: StepView) -> Point:
    figures = step.model_dump()
    values = {name: figures[key] for key, name in FIGURES.items() if figures.get(key) is not None}
    return Point(step.step, step.at, values)


def _evaluation(data: dict[str, Any]) -> dict[str, float]:
    """The loss of all, and of each source where there are several."""
    sources = data.get("sources") or ()
    losses = {f"{EVALUATION}/{name}": loss for name, loss, _ in sources} if len(sources) > 1 else {}
    return {name: loss for name, loss in {EVALUATION: data["loss"], **losses}.items() if loss is not None}


def _mark(event: EventView, title: str) -> Mark:
    return Mark(event.data["step"], event.at, title, event.reason)
