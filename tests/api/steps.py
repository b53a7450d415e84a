"""A job that makes steps and has incidents, as its controller would tell of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from service.contracts.job import Phase
from service.store.records import MetricRow
from tests.api.world import World

AT = 1_000.0  # Unix seconds of step 0; a step takes one


def loss(step: int) -> float:
    return 5.0 - step / 16  # exact in 32 bits


def told(world: World, uid: str, steps: Iterable[int], attempt: int = 1) -> None:
    """These steps are done."""
    figures = {"grad_norm": 0.5, "learning_rate": 0.25, "tokens_per_s": 1024.0, "step_s": 1.0, "mfu": None}
    rows = [MetricRow(uid, step, attempt, AT + step, {"loss": loss(step), **figures}) for step in steps]
    world.commit(metrics=rows)
    last = rows[-1].step
    world.move(uid, Phase.RUNNING, step=last, loss=loss(last), tokens_per_s=1024.0)


def happened(world: World, uid: str, type_: str, step: int, reason: str, **data: Any) -> None:
    world.commit(events=[(uid, AT + step, type_, reason, {"step": step, **data})])


def evaluated(world: World, uid: str, step: int) -> None:
    happened(world, uid, "Evaluated", step, "evaluation", loss=loss(step) + 0.5, tokens=64)


def broken(world: World, uid: str, step: int, number: int = 1) -> None:
    """A fault after `step`, and its end."""
    happened(world, uid, "IncidentOpened", step, "node n1 is gone", number=number)
    happened(world, uid, "IncidentClosed", step, "over after 2 s", number=number)


def trained(world: World, steps: int = 12, changes: dict[str, Any] | None = None) -> str:
    """A job over two attempts, the second of which did steps 5 and 6 again, and the evaluation; it goes on."""
    uid = world.submit(changes).uid
    told(world, uid, range(1, 7))
    evaluated(world, uid, 4)
    broken(world, uid, 6)
    told(world, uid, range(5, steps + 1), attempt=2)
    evaluated(world, uid, 4)
    return uid


def over(world: World, uid: str, step: int) -> None:
    world.move(uid, Phase.SUCCEEDED, "done", step=step, loss=loss(step))
