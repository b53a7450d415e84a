from __future__ import annotations

import dataclasses
from collections import Counter

from service.contracts import events
from service.contracts.cluster import Fleet, NodeHealth
from service.contracts.job import JobSpec
from service.core import demand
from tests.service.core import world
from tests.service.core.world import World


def job(slots: int, spares: int = 0, device: str = "cpu", **fields: object) -> JobSpec:
    return world.job_spec(resources={"device": device, "slots": slots, "spares": spares}, **fields)


def asked(here: World) -> Counter[demand.Bundle]:
    return demand.of(here.state)


def test_no_jobs_want_nothing() -> None:
    assert asked(World(world.fleet(2))) == Counter()


def test_who_runs_and_who_waits_are_counted_and_who_ends_is_not() -> None:
    here = World(world.fleet(1))
    here.submit("a", job=job(2))
    here.submit("b", job=job(3))
    assert asked(here) == {("cpu", 1): 5}
    here.start("a")
    here.steps(1, 10, uid="a")
    here.gang(events.GangFinished, "a")
    assert asked(here) == {("cpu", 1): 3}


def test_what_belongs_together_is_wanted_on_one_node_as_far_as_nodes_are_so_large() -> None:
    here = World(Fleet())
    here.submit(job=job(8, spares=1, device="gpu", parallel={"dp": 2, "tp": 4}))
    assert asked(here) == {("gpu", 4): 3}  # nobody knows the nodes yet
    here.observe(world.fleet(1, slots=2, device="gpu"))
    assert asked(here) == {("gpu", 2): 5}
    here.observe(world.fleet(1, slots=8, device="gpu"))
    assert asked(here) == {("gpu", 4): 2, ("gpu", 8): 1}


def test_a_node_of_no_use_takes_nobodys_place() -> None:
    here = World(world.fleet(2))
    here.submit(job=job(4))
    here.state = dataclasses.replace(here.state, health={"n1": NodeHealth(excluded="5 losses")})
    assert asked(here) == {("cpu", 1): 4, ("cpu", 2): 1}


def test_a_job_wants_the_size_that_was_asked_for_last() -> None:
    here = World(world.fleet(2))
    here.submit(job=job(2))
    here.start()
    here.steps(1, 2)
    here.rescale(4)
    assert asked(here) == {("cpu", 1): 4}
