"""The fleet of namespaces: what is lost is gone, what comes back is there, and a job trains on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from service.contracts.job import Phase
from tests.chaos import faults, invariants, job
from tests.chaos.fleet import Fleet
from tests.e2e.world import until

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def training(fleet: Fleet) -> Iterator[str]:
    uid = fleet.client.submit(job.spec(1_000_000)).uid
    until(lambda: fleet.client.get(uid).status.progress.step >= 3, "step 3")
    yield uid
    fleet.client.cancel(uid)
    until(lambda: fleet.client.get(uid).phase.terminal, "end of the job")
    assert not invariants.nothing_left(fleet, [])


def test_each_host_is_a_node_of_its_own(fleet: Fleet, training: str) -> None:
    nodes = {node.name: node for node in fleet.client.nodes()}
    assert {(name, node.rack) for name, node in nodes.items()} == set(fleet.rack_of.items())
    for host in faults.hosts_of(fleet.client.get(training)):
        assert len(fleet.processes("ray::Rank", host)) >= fleet.slots
        assert list((fleet.snapshots / host / training).rglob("*.bin"))
    assert "controller" in fleet.inventory()["actors"]
    assert len(fleet.inventory()["groups"]) >= 2


def test_a_lost_host_takes_its_memory_along_and_comes_back_empty(fleet: Fleet, training: str) -> None:
    view = fleet.client.get(training)
    host = faults.hosts_of(view)[0]
    fleet.lose(host)
    assert not fleet.net.pids(host)
    assert host not in {folder.parent.name for folder in fleet.kept()}
    fleet.join(host)
    until(lambda: {node.name for node in fleet.client.nodes()} == fleet.up, "node again")
    until(lambda: fleet.client.get(training).status.attempt > view.status.attempt, "next attempt")
    until(lambda: fleet.client.get(training).phase is Phase.RUNNING, "running job")


def test_a_raylet_that_ended_is_started_again(fleet: Fleet) -> None:
    free = next(host for host in sorted(fleet.up) if not fleet.processes("ray::Rank", host))
    assert fleet.tend() == []
    os.kill(fleet.processes("raylet", free)[0].pid, signal.SIGKILL)
    until(lambda: not fleet.processes("raylet", free), "end of the raylet")
    assert fleet.tend() == [free]
    assert fleet.processes("raylet", free)
    until(lambda: {node.name for node in fleet.client.nodes()} == fleet.up, "node again")
