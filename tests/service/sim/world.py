"""Small scenarios with round numbers, and what must hold of every simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.contracts import events
from service.contracts.job import Elastic, JobSpec
from service.core.commands import Decision
from service.core.liveness import Limits
from service.core.state import State
from service.sim import clock, pace, simulate
from service.sim.faults import Failure
from service.sim.fleet import FleetSpec
from service.sim.ledger import Use
from service.sim.phases import Phases
from service.sim.simulate import Result, Scenario
from service.sim.stretch import Stall
from tests.service.core.world import World
from workers.spec import ParallelLayout

TRACES = Path(__file__).parents[4] / "shared/data/traces"
"""Of others, beside the repository; tests of them are skipped where they are not."""

NO_STALL = Stall(0, 0)
PHASES = Phases(
    detect_process_s=2, detect_node_s=5, stop_s=1, start_s=4, connect_rank_s=0, load_memory_s=2, load_storage_s=8
)


def job(dp: int = 4, pp: int = 1, steps: int = 10**9, batch: int = 12) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": {"layers": 16, "hidden": 64, "heads": 8, "seq_len": 16},
            "data": {},
            "train": {"steps": steps, "global_batch": batch},
            "resources": {"device": "gpu", "slots": dp * pp},
            "parallel": {"dp": dp, "pp": pp},
        }
    )


def scenario(
    failures: Sequence[Failure] = (),
    until_s: float = 1000,
    nodes: int = 4,
    spec: JobSpec | None = None,
    step_s: float = 10,
    snapshot: Stall = NO_STALL,
    checkpoint: Stall = NO_STALL,
    elastic: bool = False,
    phases: Phases = PHASES,
    **fleet: Any,
) -> Scenario:
    spec = spec or job()
    if elastic:
        resources = spec.resources.model_copy(update={"elastic": Elastic(min_slots=spec.parallel.pp)})
        spec = spec.model_copy(update={"resources": resources})
    assert isinstance(spec.parallel, ParallelLayout)
    paced = pace.made(spec, spec.parallel, step_s)
    return Scenario(
        spec=spec,
        nodes=FleetSpec(**({"nodes": nodes, "slots": 1} | fleet)).made(),
        failures=failures,
        until=clock.us(until_s),
        pace=paced,
        phases=phases,
        snapshot=snapshot,
        checkpoint=checkpoint,
    )


def down(node: int, at_s: float, back_s: float) -> Failure:
    return Failure(clock.us(at_s), node, "node", "fan", clock.us(back_s))


def process(node: int, at_s: float, cause: str = "killed by signal 9") -> Failure:
    return Failure(clock.us(at_s), node, "process", cause)


def hang(node: int, at_s: float) -> Failure:
    return Failure(clock.us(at_s), node, "hang", "watchdog")


def spent(result: Result) -> dict[Use, float]:
    """The job's own seconds, those that are not 0."""
    return {use: clock.seconds(us) for use, us in result.ledger.clock.items() if us}


def run(given: Scenario) -> Result:
    """Under the invariants of the core, and of the ledger."""
    world = World()

    def decide(state: State, event: events.Event, limits: Limits) -> Decision:
        world.state, world.limits = state, limits
        return world.tell(event)

    result = simulate.run(given, decide)
    check(given, result)
    return result


def check(given: Scenario, result: Result) -> None:
    """Every second of every slot is counted once, and the core's count of useful ones is the ledger's."""
    ledger = result.ledger
    assert sum(ledger.slots.values()) == ledger.total * result.end
    assert sum(ledger.clock.values()) == result.end
    edges = [span.start for span in ledger.spans] + [result.end]
    assert edges[0] == 0
    assert [span.end for span in ledger.spans] == edges[1:]
    assert all(seconds >= 0 for use, seconds in ledger.clock.items())
    unfinished = clock.seconds(ledger.clock[Use.USEFUL]) - result.job.productive_s
    full = given.pace.full
    smallest = full if given.spec.resources.elastic is None else full.model_copy(update={"dp": 1})
    slowest = given.pace.of(smallest)
    assert -1e-6 <= unfinished <= clock.seconds(slowest) + 1e-6, "at most the step that the end cut off"
