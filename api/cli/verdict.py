"""Whether steps that were done again are what was recorded of them, and what that tells. Reads nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from api.cli.recorded import Recorded
from workers.spec import Precision
from workers.stretch import Redone

ROUNDING: dict[Precision, float] = {"float64": 1e-9, "fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
"""How far apart, relative, figures are at most where only the order of sums is another: over tens of steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    step: int
    attempt: int  # that did it
    loss: float
    grad_norm: float
    recorded_loss: float
    recorded_grad_norm: float

    @property
    def same(self) -> bool:
        return (self.loss, self.grad_norm) == (self.recorded_loss, self.recorded_grad_norm)

    @property
    def apart(self) -> float:
        """Relative, of the figure that differs more."""
        return max(_apart(self.loss, self.recorded_loss), _apart(self.grad_norm, self.recorded_grad_norm))

    def __str__(self) -> str:
        """The figure that differs more."""
        if _apart(self.loss, self.recorded_loss) >= _apart(self.grad_norm, self.recorded_grad_norm):
            return f"loss {self.loss!r} here, {self.recorded_loss!r} recorded, {self.apart:.1e} apart"
        return f"grad_norm {self.grad_norm!r} here, {self.recorded_grad_norm!r} recorded, {self.apart:.1e} apart"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """same: bit for bit. rounding: as close as another order of sums gets. differs: neither, and where bits should be
    the same, in any bit."""

    kind: Literal["same", "rounding", "differs"]
    step: int | None  # the first that differs, by more than rounding where bits may differ
    apart: float  # relative, of that step; else the most
    sentence: str


def compared(redone: Sequence[Redone], recorded: Sequence[Recorded]) -> list[Compared]:
    """Of the steps that were done again, which may be fewer."""
    return [
        Compared(then.step, then.attempt, now.loss, now.grad_norm, then.loss, then.grad_norm)
        for now, then in zip(redone, recorded, strict=False)
    ]


def judged(found: Sequence[Compared], precision: Precision, other: str) -> Verdict:
    """`other`: what is not as it was then, so that bits may differ; empty where all is."""
    allowed, most = ROUNDING[precision], max(one.apart for one in found)
    if all(one.same for one in found):
        why = "what it did comes from the code or the data, not from the hardware"
        return Verdict("same", None, 0.0, f"{_span(found)} what was recorded, bit for bit: {why}")
    limit = f"{allowed:.0e} is rounding in {precision}"
    if other and most <= allowed:
        why = f"{other}, and the code and the data give it all the same, so it is not the hardware"
        said = f"{_span(found)} what was recorded within rounding, at most {most:.1e} apart ({limit}): {why}"
        return Verdict("rounding", None, most, said)
    first = next(one for one in found if (one.apart > allowed if other else not one.same))
    said = f"step {first.step} is the first that differs: {first} ({limit}): {_suspects(first, other)}"
    return Verdict("differs", first.step, first.apart, said)


def _suspects(first: Compared, other: str) -> str:
    if other:
        return f"{other}, which explains no more: suspect the hardware of attempt {first.attempt}, or that difference"
    return (
        f"bits should be the same, so suspect the hardware of attempt {first.attempt} or of this machine, "
        "or a kernel that is not deterministic"
    )


def _span(found: Sequence[Compared]) -> str:
    first, last = found[0].step, found[-1].step
    return f"step {last} gives" if first == last else f"steps {first} to {last} give"


def _apart(one: float, other: float) -> float:
    if one == other:
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))
