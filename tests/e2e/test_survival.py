"""The gang outlives its controller."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
import ray

from service.contracts import errors
from service.contracts.status import JobView
from service.runtime import ensure
from tests import postgres
from tests.e2e.world import HALF, World, until

pytestmark = [pytest.mark.ray, pytest.mark.torch]

AWAY_S = 15.0


@ray.remote(num_cpus=0)
class Stray:
    def ready(self) -> bool:
        return True


def test_the_fleet_is_not_noted_as_the_machine_s_own_cluster(world: World) -> None:
    noted = Path("/tmp/ray/ray_current_cluster")
    assert not noted.exists() or noted.read_text() != world.fleet.cluster.address


def controllers_on_the_head(world: World) -> bool:
    raylet = world.fleet.cluster.head_node.all_processes["raylet"][0].process.pid
    return [one.ppid() for one in world.processes("ray::Controller")] == [raylet]


def test_a_new_controller_adopts_the_gang_and_sweeps_what_is_nobodys(world: World) -> None:
    uid = world.submit(train={"steps": 60}, **HALF)
    world.reach(uid, 5)
    ranks = world.pids(uid, attempt=1)
    assert controllers_on_the_head(world)  # where no node is lost that trains
    (controller,) = world.processes("ray::Controller")
    os.kill(controller.pid, signal.SIGSTOP)  # it sweeps now and then; the next one is to find the stray
    with ensure.connected(world.fleet.cluster.address):
        stray = Stray.options(name="gone-12345678/n0/0/1", lifetime="detached").remote()
        assert ray.get(stray.ready.remote())
        del stray
    os.kill(controller.pid, signal.SIGKILL)
    view = world.finish(uid)

    assert "GangAdopted" in world.events(uid)
    assert controllers_on_the_head(world)
    assert view.status.attempt == 1
    assert not view.status.incidents
    steps = list(world.client.metrics(uid))
    assert [step.step for step in steps] == list(range(1, 61))
    assert {step.attempt for step in steps} == {1}
    assert world.pids(uid, attempt=1) == ranks
    until(lambda: not world.processes("ray::Stray"), "sweep of the stray actor")


def test_training_goes_on_while_the_store_is_away(world: World, database: postgres.Server | None) -> None:
    """Nothing is decided meanwhile, and what was done is told once it is back."""
    if database is None:
        pytest.skip("needs PostgreSQL's initdb and pg_ctl, and psycopg")
    uid = world.submit(train={"steps": 2000}, **HALF)
    world.reach(uid, 5)
    database.stop()
    try:
        with pytest.raises(errors.ClusterError):
            world.client.get(uid)
        assert httpx.get(f"{world.client.url}/healthz").status_code == 200
        refused = httpx.get(f"{world.client.url}/readyz")
        assert (refused.status_code, int(refused.headers["Retry-After"]) > 0) == (503, True)
        time.sleep(AWAY_S)  # longer than the lease lasts
    finally:
        database.start()
    before = until(lambda: _answered(world, uid), "an answer")
    view = world.reach(uid, before.status.progress.step + 5)
    assert (view.status.attempt, view.status.incidents) == (1, ())
    steps = [step.step for step in world.client.metrics(uid)]
    assert steps == list(range(1, len(steps) + 1))
    during = [step for step in world.client.metrics(uid) if step.at < time.time() - 1]
    gaps = [later.at - earlier.at for earlier, later in itertools.pairwise(during)]
    assert max(gaps) < AWAY_S  # it made steps all the while


def _answered(world: World, uid: str) -> JobView | None:
    try:
        return world.client.get(uid)
    except errors.ClusterError:
        return None
