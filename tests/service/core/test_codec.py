from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from service.contracts import events
from service.contracts.cluster import NodeHealth, Strike
from service.contracts.job import Cause, Phase
from service.core import codec
from service.core.state import Job
from tests.service.core import world
from tests.service.core.world import World


@pytest.mark.parametrize("phase", Phase)
def test_round_trip_through_json(phase: Phase) -> None:
    here = World(world.fleet(2))
    here.bring(phase, job=world.job_spec(slots=4, parallel={"dp": 2, "pp": 2}))
    if not phase.terminal:
        here.gang(events.CheckpointRejected, manifest="m2", reason="checksum")
    text = json.dumps(codec.dump(here.job()), allow_nan=False)
    assert codec.load(json.loads(text)) == here.job()


def test_a_job_of_an_older_or_newer_version_is_read() -> None:
    value = codec.dump(World(world.fleet(1)).bring(Phase.RUNNING))
    del value["refusals"], value["step_s"]
    job = codec.load({**value, "added_later": 1})
    assert (job.refusals, job.step_s, job.phase) == (0, None, Phase.RUNNING)


def test_a_new_job_needs_four_values() -> None:
    value = codec.dump(Job("a", 1, world.spec(), 10.0))
    assert codec.load({key: value[key] for key in ("uid", "seq", "spec", "submitted_at")}).phase is Phase.QUEUED


def test_what_is_no_job_is_an_error() -> None:
    with pytest.raises(ValidationError):
        codec.load({"uid": "a"})


def test_the_health_of_nodes_round_trips() -> None:
    own = NodeHealth(
        (Strike(1.0, "node_lost"), Strike(2.0, "hang")), 31.0, 30.0, "Xid 79", True, True, True, (0, 3), "x"
    )
    health = {"n0": own, "n1": NodeHealth(resets=(1,))}
    assert codec.load_health(json.loads(json.dumps(codec.dump_health(health)))) == health
    assert codec.load_health({"n2": {"needs_probe": True, "added_later": 1}}) == {"n2": NodeHealth(needs_probe=True)}


def test_charges_and_what_is_wanted_survive() -> None:
    here = World(world.fleet(2))
    here.bring(Phase.RECOVERING)
    here.rescale(1)
    job = codec.load(json.loads(json.dumps(codec.dump(here.job()))))
    assert (job.charges, job.wanted_slots, job.keeping) == (((Cause.INFRASTRUCTURE, here.now),), 1, True)
