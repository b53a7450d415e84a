"""How large a cluster would hold every job at the size that it asks for, its spares too. Counts slots; places nothing.

A node that nothing may be placed on stays in the count of whoever makes nodes, so its own slots are wanted beside.
"""

from __future__ import annotations

import math
from collections import Counter

from service.contracts.cluster import Fleet
from service.contracts.job import Phase
from service.core import elastic, queue
from service.core.state import Job, State
from workers.spec import ParallelLayout

Bundle = tuple[str, int]  # device, and slots that have to be on one node
ENDING = (Phase.FINISHING, Phase.CANCELLING, Phase.SUSPENDED)


def of(state: State) -> Counter[Bundle]:
    """How many of each bundle there should be, those in use included."""
    widths = _widths(state.fleet)
    wanted: Counter[Bundle] = Counter()
    for job in state.jobs.values():
        if not job.phase.terminal and job.phase not in ENDING and not job.suspend and not _over_quota(job, state):
            wanted += _asked(job, widths)
    for node in state.fleet.nodes:
        own = state.health.get(node.name)
        if node.draining is not None or (own is not None and own.excluded):
            wanted[node.device, node.slots] += 1
    return wanted


def _over_quota(job: Job, state: State) -> bool:
    allowed = queue.allowance(job, state.jobs.values(), state.quotas)
    return job.placement is None and allowed is not None and allowed < elastic.least(job)


def _asked(job: Job, widths: dict[str, int]) -> Counter[Bundle]:
    device, count = job.spec.resources.device, elastic.slots(job)
    unit = _together(job, widths.get(device))
    wanted: Counter[Bundle] = Counter({(device, unit): count // unit})
    if rest := count % unit:
        wanted[device, rest] += 1
    if spares := job.spec.resources.spares:
        wanted[device, min(count, widths.get(device, unit))] += spares
    return +wanted


def _together(job: Job, width: int | None) -> int:
    """Slots that its placement wants on one node, as far as nodes are so large."""
    layout = job.wanted_layout or job.spec.parallel
    if not isinstance(layout, ParallelLayout):
        layout = job.layout or ParallelLayout()
    tp = 1 if job.spec.placement.tp == "any" else layout.tp
    return tp if width is None else math.gcd(tp, width)


def _widths(fleet: Fleet) -> dict[str, int]:
    """Slots of the largest node of each device."""
    widths: dict[str, int] = {}
    for node in fleet.nodes:
        widths[node.device] = max(widths.get(node.device, 0), node.slots)
    return widths
