"""The planner's figures: how long it takes at 16,384 GPUs, and what the simulator predicts on recorded faults.

`python tests/bench/planner.py --json [--trace FILE]`. The last line is one JSON object:

    search_16384_s         seconds to find the best layout of Llama 3 405B for 16,384 H100
    place_16384_s          seconds to place it on racks of unequal size with holes
    simulate_16384_54d_s   seconds to simulate Llama 3 405B on 16,384 GPUs for 54 days, at the fault rates counted there
    goodput_2048_trace     goodput_available on 2,048 nodes under a recorded trace in its whole length, with standbys
    baseline_2048_trace    the same of checkpoints each 30 minutes and restarts of 10, with spares for its full size

and `_fleet` figures, over all slots, also those that were down; `_cold` ones, without standbys. On the trace one slot
stands for a node of eight: all that is counted is whole nodes, and the time of connecting is that of 16,384 ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from service.contracts.cluster import Fleet, Node
from service.contracts.job import JobSpec, PlacementPolicy
from service.core import placement
from service.core.plan import ranking
from service.core.plan.cluster import Cluster
from service.sim import baseline, clock, pace, report, scenario, simulate, trace
from service.sim.fleet import FleetSpec
from service.sim.phases import Phases
from service.sim.simulate import Scenario
from workers.spec import ParallelLayout

TRACE = Path(__file__).parents[3] / "shared/data/traces/infinitehbd/fault_trace.json"
SLOTS = 8  # of a node
LAYOUT = {"dp": 128, "pp": 16, "tp": 8}
T = TypeVar("T")


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    found: dict[str, Any] = {}
    for name, measure in MEASURES.items():
        if name in (options.only or MEASURES):
            figures = measure(options)
            print(f"{name}: {json.dumps(figures)}", flush=True)
            found |= figures
    found["load"] = round(os.getloadavg()[0], 2)
    if options.json:
        print(json.dumps(found))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="end with one line of JSON")
    made.add_argument("--only", nargs="+", choices=list(MEASURES))
    made.add_argument("--days", type=float, default=54, help="of the run on 16,384 GPUs")
    made.add_argument("--trace", type=Path, default=TRACE, help="of faults, as InfiniteHBD's")
    made.add_argument("--trace-days", type=float, help="default its whole length")
    made.add_argument("--seed", type=int, default=0)
    return made


def simulated(options: argparse.Namespace) -> Mapping[str, Any]:
    asked = scenario.Asked(
        job=llama3_405b(),
        fleet=FleetSpec(nodes=2048, slots=SLOTS, rack=16),
        faults=scenario.RATES,
        days=options.days,
        seed=options.seed,
        phases=Phases().with_standbys(),
        elastic=True,
    )
    begun = time.perf_counter()
    result = simulate.run(scenario.made(asked))
    took = time.perf_counter() - begun
    return {
        "simulate_16384_54d_s": round(took, 2),
        "simulated_attempts": result.job.attempt,
        "goodput_16384_rates": round(report.figures(result)["goodput_available"], 4),
    }


def under_trace(options: argparse.Namespace) -> Mapping[str, Any]:
    """Nothing where there is no trace."""
    if not options.trace.exists():
        print(f"no trace at {options.trace}: name one with --trace", file=sys.stderr)
        return {}
    warm = on_trace(options, Phases().with_standbys())
    scenarios = {"goodput_2048_trace": warm, "baseline_2048_trace": baseline.of(warm)}
    return compared(scenarios) | {
        "trace_days": round(warm.until / clock.DAY, 2),
        "trace_failures": len(warm.failures),
    }


def cold_under_trace(options: argparse.Namespace) -> Mapping[str, Any]:
    """As the service starts ranks today: without standbys."""
    if not options.trace.exists():
        return {}
    return compared({"goodput_2048_trace_cold": on_trace(options, Phases())})


def compared(scenarios: Mapping[str, Scenario]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, given in scenarios.items():
        told = report.figures(simulate.run(given))
        if told["phase"] == "failed":  # the rest of the trace was not seen
            raise RuntimeError(f"{name}: {told['reason']}")
        found |= {name: round(told["goodput_available"], 4), f"{name}_fleet": round(told["goodput_fleet"], 4)}
        losses = ", ".join(f"{loss} {share:.2%}" for loss, share in told["loss_available"].items())
        print(f"{name}: {told['goodput_available']:.2%}; {losses}; {told['attempts']} attempts", flush=True)
    return found


def on_trace(options: argparse.Namespace, phases: Phases) -> Scenario:
    """2,048 nodes of one slot each, in which each takes as long as eight would."""
    whole = llama3_405b()
    recorded = trace.read(options.trace)
    span = recorded.span if options.trace_days is None else round(options.trace_days * clock.DAY)
    small = whole.model_dump() | {"parallel": LAYOUT | {"tp": 1}, "resources": {"slots": 2048}}
    asked = scenario.Asked(
        job=JobSpec.model_validate(small),
        fleet=FleetSpec(nodes=2048, slots=1, rack=16),
        faults=str(options.trace),
        days=span / clock.DAY,
        seed=options.seed,
        phases=dataclasses.replace(phases, connect_rank_s=phases.connect_rank_s * SLOTS),
        elastic=True,
        step_s=pace.estimated_s(whole, 2048 * SLOTS, "H100"),
        snapshot_s=pace.copy_s(whole, 2048 * SLOTS),
    )
    return scenario.made(asked)


def llama3_405b() -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "llama3-405b",
            "model": {"preset": "llama3-405b"},
            "data": {},
            "train": {"steps": 10**9, "global_batch": 2048},
            "resources": {"slots": 2048 * SLOTS},
            "parallel": LAYOUT,
        }
    )


def searched(options: argparse.Namespace) -> Mapping[str, Any]:
    """Seconds of CPU for the best layout of Llama 3 405B on 16,384 H100."""
    job = llama3_405b()
    ranked, took_s = timed(lambda: ranking.ranked(job.model, job.train, Cluster.of("H100", 16384)))
    return {"search_16384_s": took_s, "layout": str(ranked[0].layout)}


def placed(options: argparse.Namespace) -> Mapping[str, Any]:
    """Seconds of CPU for 16,384 slots in racks of unequal size with holes."""
    choice = random.Random(options.seed)
    racks = [choice.randint(5, 40) for _ in range(120)]
    nodes = [Node(f"id{r}-{n}", f"r{r}n{n}", 8, rack=f"r{r}") for r, size in enumerate(racks) for n in range(size)]
    taken = {(node.id, choice.randrange(8)) for node in nodes if choice.random() < 0.05}
    layout = ParallelLayout(dp=128, pp=16, tp=8)
    _, took_s = timed(lambda: placement.place(layout, Fleet(tuple(nodes)), taken, PlacementPolicy(), "cpu"))
    return {"place_16384_s": took_s}


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """What it gives and its seconds of CPU: of this thread, without collecting what others have left in the heap."""
    gc.collect()
    gc.freeze()
    try:
        began = time.thread_time()
        return call(), round(time.thread_time() - began, 3)
    finally:
        gc.unfreeze()


MEASURES: dict[str, Callable[[argparse.Namespace], Mapping[str, Any]]] = {
    "search": searched,
    "place": placed,
    "simulate": simulated,
    "trace": under_trace,
    "cold": cold_under_trace,
}
"""Each gives some of the figures; `--only` chooses."""


if __name__ == "__main__":
    sys.exit(main())
