"""A short storm on the fleet; and that the questions asked after one can be answered with no."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from api.views import StepView
from tests.chaos import invariants, job
from tests.chaos.fleet import Fleet
from tests.chaos.storm import Storm
from workers.checkpoint import manifest
from workers.checkpoint.manifest import Manifest
from workers.checkpoint.storage import Storage

pytestmark = [pytest.mark.ray, pytest.mark.torch]

STEPS = 150
MINUTES = 2.0

CALM = {1: 0.75, 2: 0.5, 3: 0.25}
OFF = 1 + 1e-12
LOSSES = (
    # what a case shows, [(step, attempt, loss)], layout of each attempt, what is said of it
    ("equal", [(1, 1, 0.75), (2, 1, 0.5), (3, 1, 0.25)], {1: "a"}, []),
    ("equal over attempts", [(1, 1, 0.75), (2, 2, 0.5), (3, 3, 0.25)], {1: "a", 2: "a", 3: "a"}, []),
    ("one bit", [(1, 1, 0.75), (2, 2, 0.5 * OFF), (3, 2, 0.25)], {1: "a", 2: "a"}, ["step 2 of attempt 2"]),
    ("after a change", [(1, 1, 0.75), (2, 2, 0.5 * OFF), (3, 2, 0.25 * OFF)], {1: "a", 2: "b"}, []),
    ("changed back", [(1, 1, 0.75), (2, 2, 0.5 * OFF), (3, 3, 0.25 * OFF)], {1: "a", 2: "b", 3: "a"}, []),
    ("before the change", [(1, 1, 0.75 * OFF), (2, 2, 0.5), (3, 2, 0.25)], {1: "a", 2: "b"}, ["step 1 of attempt 1"]),
    ("too far", [(1, 1, 0.75), (2, 2, 0.51), (3, 2, 0.25)], {1: "a", 2: "b"}, ["step 2 of attempt 2"]),
    ("a step misses", [(1, 1, 0.75), (3, 1, 0.25)], {1: "a"}, ["missing are [2]"]),
    ("a step twice", [(1, 1, 0.75), (2, 1, 0.5), (2, 2, 0.5), (3, 2, 0.25)], {1: "a", 2: "a"}, ["4 steps of 3"]),
)


@pytest.mark.parametrize(("rows", "layouts", "said"), [case[1:] for case in LOSSES], ids=[case[0] for case in LOSSES])
def test_losses(rows: list[tuple[int, int, float]], layouts: Mapping[int, str], said: list[str]) -> None:
    steps = [StepView(step=step, attempt=attempt, at=0.0, loss=loss) for step, attempt, loss in rows]
    found = invariants.losses(CALM, steps, layouts)
    assert len(found) == len(said)
    assert all(part in sentence for part, sentence in zip(said, found, strict=True))


LEDGERS = (
    ([(1, 0, 8), (2, 8, 24)], True),
    ([(1, 0, 8), (2, 16, 24)], False),  # samples missed
    ([(1, 0, 16), (2, 8, 24)], False),  # samples twice
    ([(1, 0, 8)], False),  # not to the end
    ([(2, 8, 24)], False),  # not from the start
    ([], False),
)


@pytest.mark.parametrize(("entries", "whole"), LEDGERS)
def test_ledger(tmp_path: Path, entries: list[tuple[int, int, int]], whole: bool) -> None:
    header = {"ledger": [dict(zip(("attempt", "start", "end"), entry, strict=True)) for entry in entries]}
    storage = Storage.open(str(tmp_path))
    manifest.publish(storage, Manifest("job", 3, 2, "t", 0.0, {}, {}, header, (), {}))
    assert bool(invariants.ledger(str(tmp_path), 24)) is not whole
    assert not invariants.shards(str(tmp_path))
    storage.create(f"{manifest.folder(3, 1, 't')}/rank-00000.bin", b"stray")
    assert invariants.shards(str(tmp_path)) == ["checkpoints/0000000003/1-t is in no manifest"]


def test_a_job_without_a_checkpoint_has_no_ledger(tmp_path: Path) -> None:
    assert invariants.ledger(str(tmp_path), 24)


@pytest.mark.timeout(900)
def test_a_job_in_a_storm_is_the_job_in_calm(fleet: Fleet) -> None:
    storm = Storm(fleet, seed=1, spec=job.spec(STEPS), say=print)
    calm = storm.calm()
    storm.rage(MINUTES)
    storm.settle()
    report = storm.report(calm)
    assert not report.broken
    assert len(report.kinds) >= 2
