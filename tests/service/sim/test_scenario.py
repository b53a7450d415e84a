"""What is made of what a person gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.contracts.errors import UserError
from service.contracts.job import JobSpec
from service.core.plan import ranking
from service.core.plan.cluster import Cluster
from service.sim import clock, scenario
from service.sim.fleet import FleetSpec
from service.sim.scenario import Asked
from service.sim.stretch import Stall
from tests.service.sim import world
from workers.spec import ParallelLayout

FLEET = FleetSpec(nodes=4, slots=2)


def asked(job: JobSpec | None = None, **fields: object) -> Asked:
    given = {"job": job or world.job(), "fleet": FLEET, "faults": "rates", "days": 2.0, "step_s": 10.0, **fields}
    return Asked(**given)  # type: ignore[arg-type]


def with_checkpoints(**fields: object) -> JobSpec:
    return JobSpec.model_validate(world.job().model_dump() | {"checkpoint": fields})


@pytest.mark.parametrize(
    ("job", "snapshot_s", "snapshot", "checkpoint"),
    [
        (with_checkpoints(), 0.05, Stall(1, 50_000), Stall(100, 0)),  # cheap: after each step, and saves begin with one
        (with_checkpoints(), 0.5, Stall(5, 500_000), Stall(100, 0)),  # as rarely as makes it a hundredth
        (with_checkpoints(snapshot_every=3), 0.5, Stall(3, 500_000), Stall(100, 0)),
        (with_checkpoints(snapshot_every=0, every_steps=7), 0.5, Stall(0, 0), Stall(7, 500_000)),
    ],
)
def test_snapshots_come_as_the_ranks_would_take_them(
    job: JobSpec, snapshot_s: float, snapshot: Stall, checkpoint: Stall
) -> None:
    made = scenario.made(asked(job, snapshot_s=snapshot_s))
    assert (made.snapshot, made.checkpoint) == (snapshot, checkpoint)


def test_an_auto_layout_is_the_cores_choice() -> None:
    auto = JobSpec.model_validate(world.job().model_dump() | {"parallel": "auto"})
    made = scenario.made(asked(auto, elastic=True))
    assert made.pace.full == made.spec.parallel
    assert made.pace.full.world == 4
    assert made.spec.resources.elastic is not None
    assert (made.spec.resources.elastic.min_slots, made.until) == (2, 2 * clock.DAY)
    assert scenario.made(asked(auto)).spec.resources.elastic is None


def large(**fields: object) -> JobSpec:
    """Too large for the rule of the fewest model-parallel ranks, which knows no memory."""
    given = {
        "model": {"preset": "llama3-70b"},
        "data": {},
        "train": {"steps": 100, "global_batch": 64},
        "resources": {"slots": 64},
    }
    return JobSpec.model_validate(given | fields)


@pytest.mark.parametrize("gpu", ["H100", "A100-80GB"])
def test_an_auto_layout_is_planned_for_the_fleets_kind_of_gpu(gpu: str) -> None:
    made = scenario.made(asked(large(), fleet=FleetSpec(nodes=8, slots=8, gpu=gpu), step_s=None))
    assert isinstance(made.spec.parallel, ParallelLayout)
    plan, *_ = ranking.ranked(made.spec.model, made.spec.train, Cluster.of(gpu, 64))
    assert made.spec.parallel == plan.layout
    assert clock.seconds(made.pace.step_us) == pytest.approx(plan.estimate.step_s)


def test_of_a_gpu_that_no_figures_are_known_of_the_layout_has_the_fewest_model_parallel_ranks() -> None:
    made = scenario.made(asked(large(), fleet=FleetSpec(nodes=8, slots=8, gpu="Abacus")))
    assert made.spec.parallel == ParallelLayout(dp=64)


def test_an_auto_layout_that_no_gpu_of_the_fleet_holds_is_refused() -> None:
    with pytest.raises(UserError, match="no layout fits the memory of 64 V100"):
        scenario.made(asked(large(model={"preset": "llama3-405b"}), fleet=FleetSpec(nodes=8, slots=8, gpu="V100")))


def test_rates_are_named_and_traces_come_by_path(tmp_path: Path) -> None:
    spot = scenario.failures("rates:aws-p3-spot", FLEET, clock.DAY, 0)
    usual = scenario.failures("rates", FLEET, clock.DAY, 0)
    assert len(spot) > 20 > len(usual)
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n0,add,b\n1000,remove,a\n5000,add,c\n9000,remove,b")
    assert [(one.at, one.back) for one in scenario.failures(str(path), FleetSpec(nodes=2, slots=1), 8_000_000, 0)] == [
        (1_000_000, 5_000_000)
    ]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"job": world.job(dp=12)}, "needs 12 gpu slots"),
        ({"fleet": FleetSpec(nodes=4, slots=2, device="cpu")}, "no node of the fleet"),
        ({"faults": "rates:moon"}, "no failure rates"),
        ({"faults": "/no/such/file"}, "can't be read"),
        ({"step_s": None, "fleet": FleetSpec(nodes=4, slots=2, gpu="Abacus")}, "not known"),
        ({"step_s": 1e-6}, "too short"),
    ],
)
def test_what_can_not_be_simulated_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        scenario.made(asked(**fields))
