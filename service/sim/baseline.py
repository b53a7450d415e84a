"""What is usual today, on the same faults: checkpoints to storage by the clock, cold restarts, always the same size.

It leaves as many nodes spare as are down for all but the worst hundredth of the time, which nobody knows beforehand: it
hardly ever waits. Of a node's or a process's end it knows as soon as we do. Both are in its favour; that its spares
could have worked is counted against it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from service.contracts.job import JobSpec
from service.sim import clock, pace
from service.sim.faults import Failure
from service.sim.phases import Phases
from service.sim.simulate import Scenario
from service.sim.stretch import Stall
from workers.spec import ParallelLayout, layout_problem

CHECKPOINT_S = 1800.0
RESTART_S = 600.0
QUANTILE = 0.99


def of(ours: Scenario) -> Scenario:
    """The baseline's scenario on the same nodes and faults."""
    layout = _leaving(ours, spares(ours.failures, ours.until))
    step_s = clock.seconds(ours.pace.of(layout))
    every = max(1, round(CHECKPOINT_S / step_s))
    spec = ours.spec.model_copy(
        update={
            "parallel": layout,
            "resources": ours.spec.resources.model_copy(update={"slots": layout.world, "elastic": None, "spares": 0}),
        }
    )
    return dataclasses.replace(
        ours,
        spec=spec,
        pace=pace.made(spec, layout, step_s),
        phases=_phases(ours.phases),
        snapshot=Stall(0, 0),
        checkpoint=Stall(every, clock.us(pace.copy_s(spec, layout.world))),
        room=ours.pace.full.world,
    )


def spares(failures: Sequence[Failure], span: int, quantile: float = QUANTILE) -> int:
    """Nodes that were down at once, or fewer, for `quantile` of the time."""
    changes = [(one.at, 1) for one in failures if one.kind == "node"]
    changes += [(min(one.back, span), -1) for one in failures if one.kind == "node"]
    spent: dict[int, int] = {}
    down, last = 0, 0
    for at, change in [*sorted(changes), (span, 0)]:
        spent[down] = spent.get(down, 0) + at - last
        down, last = down + change, at
    reached = 0
    for count in sorted(spent):
        reached += spent[count]
        if reached >= quantile * span:
            return count
    return 0


def _phases(ours: Phases) -> Phases:
    return dataclasses.replace(
        ours, stop_s=0.0, start_s=RESTART_S, connect_rank_s=0.0, load_memory_s=0.0, load_storage_s=0.0
    )


def _leaving(ours: Scenario, spare: int) -> ParallelLayout:
    """The most replicas that leave so many nodes, or else the fewest."""
    full, sizes = ours.pace.full, sorted(node.slots for node in ours.nodes)
    room = sum(sizes[: len(sizes) - spare]) // (full.pp * full.tp)
    layouts = [full.model_copy(update={"dp": dp}) for dp in range(full.dp, 0, -1)]
    legal = [layout for layout in layouts if _legal(layout, ours.spec)]
    return next((layout for layout in legal if layout.dp <= room), legal[-1])


def _legal(layout: ParallelLayout, spec: JobSpec) -> bool:
    return layout.dp % layout.replicate == 0 and layout_problem(layout, spec.model, spec.train) is None
