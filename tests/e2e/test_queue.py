"""A job that waits, yields, goes on, is saved and changed as its user wants, on a real fleet: no step is done twice."""

from __future__ import annotations

import pytest

from service.contracts.job import Phase
from service.contracts.status import JobView
from tests.e2e.world import HALF, World, until

pytestmark = [pytest.mark.ray, pytest.mark.torch]

LONG = {"steps": 4000}
RARE = {"every_steps": 1000}


def on(world: World, uid: str, attempt: int) -> JobView:
    def there() -> JobView | None:
        view = world.client.get(uid)
        return view if view.status.attempt == attempt and view.phase is Phase.RUNNING else None

    return until(there, f"attempt {attempt} of {uid}")


def test_a_job_yields_to_one_that_comes_first_is_suspended_changed_and_ends_after_a_step(world: World) -> None:
    low = world.submit(**HALF, train=LONG, checkpoint=RARE)
    world.reach(low, 5)
    high = world.submit(train={"steps": 8}, priority=5)
    yielded = world.phase(low, Phase.QUEUED)
    assert yielded.status.checkpoint_step == yielded.status.progress.step
    assert yielded.status.position in (None, 1)
    assert world.finish(high).status.progress.step == 8
    on(world, low, 2)

    world.client.suspend(low)
    waits = world.phase(low, Phase.SUSPENDED)
    step = waits.status.progress.step
    assert (waits.desired, waits.status.checkpoint_step, waits.status.holds_slots) == ("suspended", step, False)
    assert [one.status for one in waits.status.conditions if one.type in ("Suspended", "Admitted")] == [False, True]
    until(lambda: world.processes("ray::Rank") == [], "end of its processes")
    world.client.change(low, {"checkpoint": {"keep": 7}, "priority": 3}, waits.generation)
    until(lambda: world.client.get(low).status.observed_generation == 2, "change that is seen")
    world.client.resume(low)
    on(world, low, 3)

    later = world.reach(low, step + 3).status.progress.step
    world.client.save(low)
    assert world.saved(low, later) < 1000
    world.client.change(low, {"checkpoint": {"every_steps": 5}})  # the ranks hear of it by another start
    on(world, low, 4)
    world.saved(low, world.client.get(low).status.progress.step + 5)

    world.client.cancel(low, graceful=True)
    over = world.phase(low, Phase.CANCELLED)
    assert over.status.checkpoint_step == over.status.progress.step
    assert list(world.losses(low)) == list(range(1, over.status.progress.step + 1))
    assert [(one.kind, one.steps_redone) for one in over.status.incidents] == [("restart", 0)]
