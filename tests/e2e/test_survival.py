"""The gang outlives its controller."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray

from service.runtime import ensure
from tests.e2e.world import HALF, World, until

pytestmark = [pytest.mark.ray, pytest.mark.torch]


@ray.remote(num_cpus=0)
class Stray:
    def ready(self) -> bool:
        return True


def test_the_fleet_is_not_noted_as_the_machine_s_own_cluster(world: World) -> None:
    noted = Path("/tmp/ray/ray_current_cluster")
    assert not noted.exists() or noted.read_text() != world.fleet.cluster.address


def test_a_new_controller_adopts_the_gang_and_sweeps_what_is_nobodys(world: World) -> None:
    uid = world.submit(train={"steps": 60}, **HALF)
    world.reach(uid, 5)
    ranks = world.pids(uid, attempt=1)
    (controller,) = world.processes("ray::Controller")
    os.kill(controller.pid, signal.SIGSTOP)  # it sweeps now and then; the next one is to find the stray
    with ensure.connected(world.fleet.cluster.address):
        stray = Stray.options(name="gone-12345678/n0/0/1", lifetime="detached").remote()
        assert ray.get(stray.ready.remote())
        del stray
    os.kill(controller.pid, signal.SIGKILL)
    view = world.finish(uid)

    assert "GangAdopted" in world.events(uid)
    assert view.status.attempt == 1
    assert not view.status.incidents
    steps = list(world.client.metrics(uid))
    assert [step.step for step in steps] == list(range(1, 61))
    assert {step.attempt for step in steps} == {1}
    assert world.pids(uid, attempt=1) == ranks
    until(lambda: not world.processes("ray::Stray"), "sweep of the stray actor")
