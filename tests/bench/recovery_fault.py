"""One fault of a training that runs: in the middle of a step, between two checkpoints; and what it cost.

Knows no side: neither who runs the training, nor how a rank or a node of it is killed.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")
Fault = Literal["rank", "node"]

EVERY = 10  # steps between two checkpoints
NEAR = 3  # steps before the one in which a rank is killed
STEADY = 8  # steps of an attempt before it is broken
VICTIM = 5  # rank that is killed; its node is the one that is lost
JOB: dict[str, Any] = {
    "name": "recovery",
    "model": {"layers": 4, "hidden": 128, "heads": 8, "kv_heads": 2, "ffn_hidden": 344, "seq_len": 128},
    "data": {},
    "train": {"steps": 100_000, "global_batch": 8, "learning_rate": 1e-3, "precision": "fp32", "seed": 3},
    "parallel": {"dp": 2, "pp": 2, "tp": 2},
    "checkpoint": {"every_steps": EVERY},
}
"""What all sides train; the service's own fields are added on our side."""


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """An attempt completed a step."""

    step: int
    attempt: int
    at: float  # Unix seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    recover_s: float  # from the SIGKILL to the end of the first step that no attempt had completed
    steps_redone: int
    step_s: float  # median of the last steps before
    load: float  # of the machine, before
    parts: Mapping[str, float]  # seconds of recover_s by what they were for, where the side tells


class Side(Protocol):
    def steps(self) -> Sequence[Done]:
        """All that were heard of so far, in the order in which they were completed."""

    def mend(self) -> None:
        """Replace what was lost, and return when it is as well prepared for a fault as it will ever be."""

    def kill(self, fault: Fault) -> None:
        """SIGKILL to rank `VICTIM`, or to all processes of its node."""

    def redone(self, broken: int) -> int:
        """Completed steps of attempt `broken` that were run again."""

    def parts(self, broken: int) -> Mapping[str, float]:
        """What the recovery from the loss of attempt `broken` consisted of; empty where nobody tells."""


def until(condition: Callable[[], T], what: str, timeout_s: float = 240.0) -> T:
    """The first true value of `condition`; RuntimeError at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {what} in {timeout_s:.0f} s")
        time.sleep(0.1)
    return value


def suffer(side: Side, fault: Fault) -> Cost:
    until(lambda: steady(side.steps()), "steady training")
    side.mend()
    load = os.getloadavg()[0]
    wait_s = until(lambda: to_middle(side.steps(), time.time()), "middle of a step")
    before = list(side.steps())
    time.sleep(wait_s)
    broken, began = before[-1].attempt, time.time()
    side.kill(fault)
    first = until(lambda: new_step(side.steps(), broken), f"new step after the loss of a {fault}")
    return Cost(first.at - began, side.redone(broken), step_s(before), load, side.parts(broken))


def steady(steps: Sequence[Done]) -> bool:
    """A checkpoint was published, and the attempt is no longer at its slow beginning."""
    return bool(steps) and steps[-1].step >= EVERY and len(of_attempt(steps)) >= STEADY


def of_attempt(steps: Sequence[Done]) -> list[Done]:
    return [done for done in steps if done.attempt == steps[-1].attempt]


def to_middle(steps: Sequence[Done], now: float) -> float:
    """Seconds to the middle of the step that follows the `EVERY / 2`th after a checkpoint; 0 when it is over or far.

    What is heard late is reckoned on from the last step that was heard of.
    """
    last = steps[-1]
    ahead = (EVERY // 2 - last.step) % EVERY
    return max(0.0, last.at + (ahead + 0.5) * step_s(steps) - now) if ahead <= NEAR else 0.0


def step_s(steps: Sequence[Done]) -> float:
    """Median of the last ones."""
    recent = of_attempt(steps)[-STEADY:]
    return statistics.median(after.at - before.at for before, after in itertools.pairwise(recent))


def new_step(steps: Sequence[Done], broken: int) -> Done | None:
    """The first step of later attempts that is further than all of attempt `broken`."""
    furthest = max(done.step for done in steps if done.attempt == broken)
    return next((done for done in steps if done.attempt > broken and done.step > furthest), None)


def again(steps: Sequence[Done], broken: int) -> int:
    furthest = max(done.step for done in steps if done.attempt == broken)
    return sum(done.attempt > broken and done.step <= furthest for done in steps)
