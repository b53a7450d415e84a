from __future__ import annotations

import dataclasses

import pytest

from service.contracts import events
from service.contracts.cluster import Fleet, NodeHealth
from service.contracts.job import Cause, JobSpec, Phase
from service.core import health, liveness
from service.core.commands import PauseGang, StartGang, StopGang
from tests.service.core import world
from tests.service.core.world import World

LIMITS = liveness.DEFAULT
TP2 = {"tp": 2}


def job(slots: int = 2, least: int | None = None) -> JobSpec:
    bounds = {"min_slots": least} if least else None
    resources = {"device": "cpu", "slots": slots, "elastic": bounds}
    return world.job_spec(steps=10_000, resources=resources, parallel={"dp": slots // 2, **TP2})


def going(nodes: Fleet, slots: int = 2, limits: liveness.Limits = LIMITS, least: int | None = None) -> World:
    here = World(nodes, limits)
    here.submit(job=job(slots, least))
    here.start()
    here.steps(1, 4)
    return here


def found(here: World, action: str, node: str = "n0", devices: tuple[int, ...] = ()) -> tuple[type, ...]:
    decision = here.tell(events.HealthFound(node, action, "Xid 79: fell off the bus", here.now, devices))
    return tuple(map(type, decision.commands))


def flap(here: World, name: str, serial: int, away_s: float = 10.0) -> None:
    """The node goes and comes back as another one."""
    node = next(one for one in here.state.fleet.nodes if one.name == name)
    here.observe(world.without(here.state.fleet, name))
    here.now += away_s
    nodes = (*here.state.fleet.nodes, dataclasses.replace(node, id=f"{name}.{serial}"))
    here.observe(Fleet(tuple(sorted(nodes, key=lambda one: one.name))))


def test_f8_a_node_that_comes_back_cools_down_twice_as_long_each_time_and_is_excluded_then() -> None:
    here = going(world.fleet(1))
    for serial, cooldown in enumerate((30, 60, 120, 240)):
        flap(here, "n0", serial)
        here.stopped()
        times = f"{serial + 1} loss{'es' if serial else ''}"
        assert here.job().reason == (
            f"needs 2 slots; the fleet has no cpu node; n0 cools down for {cooldown} s after {times}"
            "; it would not fit if all were free"
        )
        assert here.tick(cooldown - 1).commands == ()
        here.tick(1)
        assert here.job().phase is Phase.PLACING
        here.start(resumed=4)
        here.steps(here.job().high_step + 1, here.job().high_step + 1)
    flap(here, "n0", 9)
    here.stopped()
    here.tick(5000)
    assert "n0 is excluded: 5 losses within 60 minutes" in here.job().reason
    here.tell(events.NodeForgiven("n0", here.now))
    assert (here.job().phase, dict(here.state.health)) == (Phase.PLACING, {})


def test_strikes_are_forgotten_after_their_window() -> None:
    own = NodeHealth()
    for at in (0.0, 3500.0, 3700.0):
        own = health.struck(own, "node_lost", at, LIMITS)
    assert [strike.at for strike in own.strikes] == [3500.0, 3700.0]


@pytest.mark.parametrize(
    ("kind", "strikes"),
    [("node_lost", 1), ("process_died", 1), ("hang", 1), ("device", 1), ("out_of_memory", 0), ("user", 0),
     ("numeric", 0), ("storage", 0), ("peer", 0), ("preempted", 0), ("gang_lost", 0)],
)  # fmt: skip
def test_what_is_held_against_a_node(kind: str, strikes: int) -> None:
    here = going(world.fleet(1))
    here.gang(events.GangFaulted, faults=(events.Fault(kind, "bad", rank=0, node="n0"),))
    assert len(here.state.health.get("n0", NodeHealth()).strikes) == strikes
    here.stopped()
    here.tick(2)
    assert here.job().phase is Phase.PLACING  # the node did not go away: it is used again at once


def test_a_dead_rank_weighs_a_quarter_of_a_lost_node() -> None:
    own = NodeHealth()
    for _ in range(19):
        own = health.struck(own, "process_died", 1.0, LIMITS)
    assert not own.excluded
    assert health.struck(own, "process_died", 1.0, LIMITS).excluded == "20 strikes within 60 minutes"


def test_f8_a_returned_node_passes_a_probe_first_where_that_is_asked_for() -> None:
    here = going(world.fleet(1), limits=liveness.Limits(probe=True, cooldown_s=0))
    flap(here, "n0", 1)
    here.stopped()
    assert "n0 is to be probed" in here.job().reason
    here.tell(events.NodeProbed("n0", False, "GEMM is off by 3", here.now))
    assert "n0 is excluded: its probe failed: GEMM is off by 3" in here.job().reason
    here.tell(events.NodeForgiven("n0", here.now))
    assert here.job().phase is Phase.PLACING


def test_who_may_have_computed_wrong_is_probed_before_it_is_used_again() -> None:
    here = going(world.fleet(3), slots=4)
    used = sorted({slot.name for slot in here.job().placement.slots})
    faults = tuple(events.Fault("corruption", "layer 3", rank=rank, node=node) for rank, node in enumerate(used))
    peer = events.Fault("peer", "layer 3", rank=3, node=used[0])
    here.gang(events.GangFaulted, faults=(peer, *faults))
    assert here.job().incidents[-1].kind == "corruption"
    assert {name for name, own in here.state.health.items() if own.needs_probe} == set(used)
    here.stopped()
    assert "is to be probed" in here.job().reason
    here.tell(events.NodeProbed(used[0], False, "GEMM is off by 3", here.now))
    here.tell(events.NodeProbed(used[1], True, "its probe passed", here.now))
    here.tick(2)
    assert here.job().phase is Phase.PLACING
    assert used[0] not in {slot.name for slot in here.job().placement.slots}


def test_a_probe_that_passes_lets_the_node_in() -> None:
    here = going(world.fleet(1), limits=liveness.Limits(probe=True, cooldown_s=0))
    flap(here, "n0", 1)
    here.stopped()
    here.tell(events.NodeProbed("n0", True, "all well", here.now))
    assert here.job().phase is Phase.PLACING


def test_what_is_only_to_be_noted_is_noted() -> None:
    here = going(world.fleet(2))
    assert found(here, "log") == ()
    assert here.records[-1].type == "HealthFound"
    assert here.records[-1].reason == "node n0 asks for log: Xid 79: fell off the bus"
    said = len(here.records)
    found(here, "log", "n1")  # nobody stands there
    assert len(here.records) == said
    assert here.state.health["n1"].note == "Xid 79: fell off the bus"


def test_a_restart_is_one_of_a_storm() -> None:
    here = going(world.fleet(1))
    assert found(here, "restart") == (StopGang,)
    assert (here.job().incidents[-1].kind, here.job().incidents[-1].cause) == ("device", Cause.INFRASTRUCTURE)
    here.stopped()
    here.start(resumed=4)
    here.now += 1
    assert found(here, "restart") == ()
    here.now += 10
    assert found(here, "restart") == (StopGang,)


def test_a_device_is_reset_when_it_is_free_and_not_placed_on_before() -> None:
    here = going(world.fleet(1))
    assert found(here, "reset", devices=(1,)) == ()
    assert here.state.health["n0"].resets == (1,)
    here.fault()
    here.stopped()
    assert here.job().phase is Phase.RECOVERING
    assert health.resettable(here.state) == {"n0": (1,)}
    here.tell(events.DevicesReset("n0", (1,), here.now))
    assert here.job().phase is Phase.PLACING
    assert health.resettable(here.state) == {}


def test_a_drained_node_is_left_by_a_pause_at_nobodys_cost() -> None:
    here = going(world.fleet(2))
    assert found(here, "drain") == (PauseGang,)
    assert here.job().reason == "node n0 is drained: Xid 79: fell off the bus; the job moves away from it"
    here.paused()
    (start,) = here.stopped().commands
    assert {slot.name for slot in start.placement.slots} == {"n1"}
    (incident,) = here.job().incidents
    assert (incident.kind, incident.cause, incident.node, here.job().charges) == ("drain", None, "n0", ())


def test_a_drained_node_makes_a_job_smaller_where_there_is_no_other() -> None:
    here = going(world.fleet(2), slots=4, least=2)
    found(here, "drain", "n1")
    here.paused()
    here.stopped()
    assert "2 of 4 slots: node n1 is gone and no spare is left; dp 1 x pp 1 x tp 2" in here.job().reason


def test_a_reboot_is_not_waited_for_and_over_when_the_node_is_back() -> None:
    here = going(world.fleet(2))
    assert found(here, "reboot") == (StopGang,)
    here.stopped()
    assert {slot.name for slot in here.job().placement.slots} == {"n1"}
    flap(here, "n0", 1)
    assert not here.state.health["n0"].excluded


def test_a_node_that_is_about_to_go_is_left_before_its_deadline_and_charged_to_preemption() -> None:
    here = going(world.fleet(2))
    nodes = here.state.fleet.nodes
    going_at = here.now + 30
    decision = here.observe(Fleet((dataclasses.replace(nodes[0], draining=going_at), nodes[1])))
    assert [type(order) for order in decision.commands] == [PauseGang]
    assert here.job().pause.until == going_at
    here.paused()
    here.stopped()
    (incident,) = here.job().incidents
    assert (incident.kind, incident.cause, incident.node) == ("preempted", Cause.PREEMPTION, "n0")
    assert {slot.name for slot in here.job().placement.slots} == {"n1"}
    assert [cause for cause, _ in here.job().charges] == [Cause.PREEMPTION]
    assert dict(here.state.health) == {}


def test_a_node_that_goes_as_it_said_is_a_preemption_though_the_pause_came_too_late() -> None:
    here = going(world.fleet(2))
    nodes = here.state.fleet.nodes
    here.observe(Fleet((dataclasses.replace(nodes[0], draining=here.now + 30), nodes[1])))
    here.observe(Fleet(nodes[1:]))
    (incident,) = here.job().incidents
    assert (here.job().phase, incident.kind, incident.cause) == (Phase.RECOVERING, "preempted", Cause.PREEMPTION)
    assert dict(here.state.health) == {}


def test_a_node_that_refuses_again_and_again_is_avoided() -> None:
    here = World(world.fleet(2))
    here.submit(job=job())
    for wait in (1, 2, 4):
        here.gang(events.GangRefused, reason="no room", node="n0")
        here.tick(wait)
    assert here.state.health["n0"].cooldown_until > here.now
    assert isinstance(here.commands[-1], StartGang)
    assert {slot.name for slot in here.job().placement.slots} == {"n1"}
