"""What a replay tells: bits, rounding, or the first step that differs; a table."""

from __future__ import annotations

import math

import pytest

from api.cli import verdict
from api.cli.recorded import Recorded
from workers.stretch import Redone

THEN = (Recorded(5, 1, 2.5, 1.0, 40), Recorded(6, 1, 2.25, 0.5, 48))
SAME = (Redone(5, 2.5, 1.0), Redone(6, 2.25, 0.5))
NEAR = (SAME[0], Redone(6, math.nextafter(2.25, 3), 0.5))
FAR = (SAME[0], Redone(6, 2.25, 0.75))
NOTHING = (Redone(5, math.nan, math.nan),)
ONE = "it was done as dp 2, and here as dp 1"


@pytest.mark.parametrize(
    ("redone", "other", "kind", "step", "says"),
    [
        (SAME, "", "same", None, ("steps 5 to 6 give", "bit for bit", "not from the hardware")),
        (SAME, ONE, "same", None, ("bit for bit",)),
        (NEAR, "", "differs", 6, ("step 6 is the first that differs", "2.2500000000000004 here, 2.25 recorded")),
        (NEAR, ONE, "rounding", None, ("within rounding, at most 2.0e-16 apart", ONE)),
        (FAR, "", "differs", 6, ("grad_norm 0.75 here, 0.5 recorded, 3.3e-01 apart", "hardware of attempt 1")),
        (FAR, ONE, "differs", 6, ("step 6 is the first that differs", ONE, "hardware of attempt 1")),
        (NOTHING, "", "differs", 5, ("loss nan here, 2.5 recorded, inf apart",)),
        (NOTHING, ONE, "differs", 5, ("loss nan here",)),
    ],
)
def test_verdicts(redone: tuple[Redone, ...], other: str, kind: str, step: int | None, says: tuple[str, ...]) -> None:
    found = verdict.judged(verdict.compared(redone, THEN), "float64", other)
    assert (found.kind, found.step) == (kind, step)
    for words in says:
        assert words in found.sentence
    assert "\n" not in found.sentence


@pytest.mark.parametrize(("precision", "kind"), [("float64", "differs"), ("fp32", "differs"), ("bf16", "rounding")])
def test_what_is_rounding_depends_on_the_precision(precision, kind: str) -> None:
    found = verdict.compared((Redone(5, 2.51, 1.0),), THEN)
    assert verdict.judged(found, precision, ONE).kind == kind


def test_the_span_of_one_step() -> None:
    found = verdict.judged(verdict.compared(SAME[1:], THEN[1:]), "fp32", "")
    assert found.sentence.startswith("step 6 gives what was recorded, bit for bit: ")
