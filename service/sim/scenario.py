"""From what a person gives, a job, a fleet, faults, durations, to a scenario. What is not given is estimated."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from service.contracts.cluster import Fleet
from service.contracts.errors import UserError
from service.contracts.job import Elastic, JobSpec
from service.core.plan import search
from service.core.plan.search import Choice
from service.sim import clock, faults, pace, trace
from service.sim.faults import Failure
from service.sim.fleet import FleetSpec
from service.sim.phases import Phases
from service.sim.simulate import Scenario
from service.sim.stretch import Stall
from workers.checkpoint import memory

RATES = "rates"
USUAL_RATES = "llama3-405b"


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """`faults` is the path of a trace, `rates`, or `rates:NAME`."""

    job: JobSpec
    fleet: FleetSpec
    faults: str
    days: float
    seed: int = 0
    phases: Phases = dataclasses.field(default_factory=Phases)
    elastic: bool = False
    min_slots: int | None = None  # default half of the job's
    step_s: float | None = None
    snapshot_s: float | None = None  # that the ranks wait for one


def made(asked: Asked) -> Scenario:
    """UserError where the job never fits the fleet, or something can't be known."""
    nodes, span = asked.fleet.made(), round(asked.days * clock.DAY)
    search.check_fits(asked.job, Fleet(nodes))
    choice = search.chosen(asked.job, Fleet(nodes))
    layout, resources = choice.layout, asked.job.resources
    if asked.elastic:
        bounds = Elastic(min_slots=asked.min_slots or max(1, layout.world // 2))
        resources = resources.model_copy(update={"elastic": bounds})
    spec = asked.job.model_copy(update={"parallel": layout, "resources": resources})
    step_s = asked.step_s or _estimated_s(spec, choice, asked.fleet.gpu)
    if step_s < 1e-4:
        raise UserError(f"a step of {step_s:g} s is too short", hint="give the time of a step with --step-s")
    paced = pace.made(spec, layout, step_s)
    snapshot = _snapshot(asked, spec, layout.world, step_s)
    return Scenario(
        spec=spec,
        nodes=nodes,
        failures=failures(asked.faults, asked.fleet, span, asked.seed),
        until=span,
        pace=paced,
        phases=asked.phases,
        snapshot=snapshot,
        # Storage is written from a snapshot's memory: the ranks wait for the copy once.
        checkpoint=Stall(spec.checkpoint.every_steps, 0 if snapshot.every else clock.us(_copy_s(asked, spec))),
    )


def _estimated_s(spec: JobSpec, choice: Choice, gpu: str) -> float:
    """The plan's, where the layout was planned by the cost model."""
    return choice.plans[0].estimate.step_s if choice.plans else pace.estimated_s(spec, choice.layout.world, gpu)


def failures(source: str, fleet: FleetSpec, span: int, seed: int) -> list[Failure]:
    kind, _, name = source.partition(":")
    if kind == RATES:
        return faults.drawn(faults.table(name or USUAL_RATES), [fleet.slots] * fleet.nodes, span, seed)
    return trace.spread(trace.read(Path(source)), fleet.nodes, span, seed)


def _snapshot(asked: Asked, spec: JobSpec, slots: int, step_s: float) -> Stall:
    """As the ranks would choose it."""
    cost_s, every = _copy_s(asked, spec), spec.checkpoint.snapshot_every
    chosen = memory.interval(cost_s, step_s, slots) if every == "auto" else every
    return Stall(chosen, clock.us(cost_s)) if chosen else Stall(0, 0)


def _copy_s(asked: Asked, spec: JobSpec) -> float:
    return asked.snapshot_s if asked.snapshot_s is not None else pace.copy_s(spec, spec.resources.slots)
