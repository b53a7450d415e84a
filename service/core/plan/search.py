"""The layout of `parallel: auto`, and whether a job can ever run on a fleet.

There is no cost model here: neither memory nor step time is predicted. The choice is the layout with the
fewest model-parallel ranks that uses all slots of the job and fits the fleet when it is empty; a job whose
model needs more memory than that leaves to a rank must name its own layout.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from service.contracts.cluster import Fleet, Node
from service.contracts.errors import PlacementRefused, UserError
from service.contracts.job import JobSpec
from service.core import placement
from workers.spec import ParallelLayout, layouts


def choose(spec: JobSpec, fleet: Fleet) -> tuple[ParallelLayout, str]:
    """The layout and the sentence that says why. PlacementRefused when none fits even the empty fleet."""
    if isinstance(spec.parallel, ParallelLayout):
        return spec.parallel, f"{spec.parallel} as the job asks"
    candidates = _full(spec)
    if not candidates:
        raise PlacementRefused(f"no layout of this model and batch uses all {spec.resources.slots} slots")
    for layout in candidates:
        if _refusal(spec, layout, fleet) is None:
            ranks = layout.pp * layout.tp
            return (
                layout,
                f"{layout} uses all {layout.world} slots with the fewest model-parallel ranks, {ranks}",
            )
    raise PlacementRefused(_refusal(spec, candidates[0], fleet) or "")


def check_fits(spec: JobSpec, fleet: Fleet) -> None:
    """UserError, with what would work, when the job could never be placed on these nodes, all free.

    A fleet without nodes is not known yet, and refuses nothing.
    """
    if not fleet.nodes:
        return
    slots, device = spec.resources.slots, spec.resources.device
    nodes = [node for node in fleet.nodes if node.device == device]
    if not nodes:
        other = fleet.nodes[0].device
        raise UserError(
            f"needs {slots} {device} slots; no node of the fleet has any",
            hint=f"resources.device {other} has {fleet.slots} slots",
            field="resources.device",
        )
    total = sum(node.slots for node in nodes)
    if slots > total:
        raise UserError(
            f"needs {slots} {device} slots; the fleet has {total}",
            hint=f"set resources.slots to {total} or less",
            field="resources.slots",
        )
    if spec.parallel == "auto" and not _full(spec):
        smaller = next((layout.world for layout in layouts(slots, spec.model, spec.train)), None)
        raise UserError(
            f"no layout of this model and batch uses all {slots} slots",
            hint=f"resources.slots {smaller} would work" if smaller else "change train.global_batch",
            field="resources.slots",
        )
    widest, what = _widest(nodes, spec.placement.tp)
    layout = spec.parallel
    if isinstance(layout, ParallelLayout) and spec.placement.tp != "any" and layout.tp > widest:
        raise UserError(
            f"tp {layout.tp} needs {what} with {layout.tp} {device} slots; the largest has {widest}",
            hint=_working(spec, fleet),
            field="parallel.tp",
        )
    try:
        chosen, _ = choose(spec, fleet)
    except PlacementRefused as refused:
        raise UserError(refused.message, hint=_working(spec, fleet), field="resources.slots") from None
    problem = _refusal(spec, chosen, fleet)
    if problem is not None:
        raise UserError(problem, hint=_working(spec, fleet), field="parallel")


def _widest(nodes: Sequence[Node], level: str) -> tuple[int, str]:
    """Slots of the largest place that a tp group must not leave, and what that is."""
    slots: Counter[str] = Counter()
    for node in nodes:
        slots[node.id if level == "node" else node.domain_key] += node.slots
    spans = len(slots) < len(nodes)
    return max(slots.values()), "an NVLink domain" if spans else "a node"


def _full(spec: JobSpec) -> list[ParallelLayout]:
    """Layouts of all slots: even replicas first, then the fewest model-parallel ranks, of equals the fewest stages."""
    slots, batch = spec.resources.slots, spec.train.global_batch
    every = layouts(slots, spec.model, spec.train)
    full = itertools.takewhile(lambda layout: layout.world == slots, every)
    return sorted(full, key=lambda layout: (batch % layout.dp != 0, layout.pp * layout.tp, layout.pp))


def _refusal(spec: JobSpec, layout: ParallelLayout, fleet: Fleet) -> str | None:
    try:
        placement.place(layout, fleet, frozenset(), spec.placement, spec.resources.device)
    except PlacementRefused as refused:
        return refused.message
    return None


def _working(spec: JobSpec, fleet: Fleet) -> str:
    def fitting() -> Iterator[str]:
        for layout in _full(spec):
            if _refusal(spec, layout, fleet) is None:
                yield str(layout)

    found = "; ".join(itertools.islice(fitting(), 3)) or "none; use fewer slots, or lift placement.tp or pp to any"
    return f"layouts that fit: {found}"
