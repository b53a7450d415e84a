from __future__ import annotations

import pytest

from service.contracts import events
from service.contracts.job import Phase
from service.core.status import status
from tests.service.core import world
from tests.service.core.world import World


def test_a_running_job() -> None:
    here = World(world.fleet(2))
    here.bring(Phase.RUNNING, job=world.spec(slots=3, steps=10))
    here.gang(events.CheckpointPublished, step=4, manifest="m4")
    here.gang(events.Evaluated, step=4, loss=2.5, tokens=4096)
    told = status(here.job())
    assert (told.attempt, told.holds_slots, told.checkpoint_step, told.checkpoint) == (1, True, 4, "m4")
    assert [(place.rank, place.node, place.slot) for place in told.placement] == [
        (0, "n0", 0),
        (1, "n0", 1),
        (2, "n1", 0),
    ]
    progress = told.progress
    assert (progress.step, progress.steps, progress.samples, progress.tokens) == (4, 10, 64, 1024)
    assert (progress.eval_loss, progress.eval_step) == (2.5, 4)
    assert (progress.loss, progress.tokens_per_s, progress.eta_s) == (1.0, 512.0, 6 * world.STEP_S)


def test_incidents_are_told_as_they_are_kept() -> None:
    here = World(world.fleet(1))
    here.bring(Phase.RECOVERING)
    (told,) = status(here.job()).incidents
    (kept,) = here.job().incidents
    assert (told.number, told.kind, told.action, told.recover_s) == (1, "process_died", kept.action, None)


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.CANCELLED, Phase.SUCCEEDED, Phase.FAILED])
def test_a_job_without_a_gang_has_no_place_and_no_eta(phase: Phase) -> None:
    here = World(world.fleet(1))
    told = status(here.bring(phase))
    assert (told.placement, told.holds_slots, told.progress.eta_s) == ((), False, None)
