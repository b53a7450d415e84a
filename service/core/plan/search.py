"""The layout of `parallel: auto`, and whether a job can ever run on a fleet.

On devices that figures are known of, GPUs of the hardware table or what was probed, it is the fastest one by the cost
model that fits their memory and can be placed when the fleet is empty. Elsewhere neither memory nor step time is
predicted: it is then the layout with the fewest model-parallel ranks that uses all slots of the job; a job whose model
needs more memory than that leaves to a rank must name its own layout.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

from service.contracts.cluster import Fleet, Node
from service.contracts.errors import PlacementRefused, UserError
from service.contracts.job import JobSpec, PlacementPolicy
from service.core import placement
from service.core.plan import kinds, mixed, ranking, reasons
from service.core.plan.kinds import Figures, Kind
from service.core.plan.ranking import Plan
from workers.models.spec import ModelSpec
from workers.spec import ParallelLayout, TrainSpec, layouts

SHOWN = 4  # plans that are kept: the best and the next three


class MemoryLacking(PlacementRefused):
    """No layout of the model fits the memory of so many devices."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What to place, and on which nodes. `plans`: the best by the cost model, of which it is the first; none where the
    cost model was not asked. `speeds`: FLOP/s of one device by kind, where replicas are to stand on several."""

    layout: ParallelLayout
    reason: str
    fleet: Fleet
    plans: tuple[Plan, ...] = ()
    speeds: Mapping[str, float] | None = None


def choose(spec: JobSpec, fleet: Fleet, figures: Figures = kinds.known) -> tuple[ParallelLayout, str]:
    """The layout and the sentence that says why. PlacementRefused when none fits even the empty fleet.

    For those who place it without the speeds of `chosen`: which replica stands on which kind is then not known.
    """
    choice = chosen(spec, fleet, figures=figures)
    layout = choice.layout.model_copy(update={"replica_weights": None}) if choice.speeds else choice.layout
    return layout, choice.reason


def chosen(
    spec: JobSpec, fleet: Fleet, taken: Set[tuple[str, int]] = frozenset(), figures: Figures = kinds.known
) -> Choice:
    """As `choose`. Of kinds of GPU those that have room beside what is `taken` come first."""
    if isinstance(spec.parallel, ParallelLayout):
        return Choice(spec.parallel, f"{spec.parallel} as the job asks", fleet)
    slots = spec.resources.slots
    known = kinds.of(fleet, spec.resources.device, figures)
    alone = [kind for kind in known if kind.fleet.slots >= slots]
    if not alone:
        return _together(spec, fleet, known)
    roomy = [kind for kind in alone if kind.free(taken) >= slots] or alone
    answers = [_by_cost(spec.model, spec.train, spec.placement, slots, kind) for kind in roomy]
    if best := [answer for answer in answers if isinstance(answer, Choice)]:
        return min(best, key=lambda choice: choice.plans[0].estimate.step_s)
    if refused := next((answer for answer in answers if isinstance(answer, PlacementRefused)), None):
        raise type(refused)(refused.message, hint=refused.hint)
    return _by_size(spec, fleet)


def _together(spec: JobSpec, fleet: Fleet, known: tuple[Kind, ...]) -> Choice:
    """On several kinds of GPU, where none has room alone and figures are known of enough of them."""
    slots, there = spec.resources.slots, sum(kind.fleet.slots for kind in known)
    if not known or there < slots:
        return _by_size(spec, fleet)
    if found := mixed.best(spec.model, spec.train, spec.placement, slots, known):
        both = Fleet(tuple(node for kind in known for node in kind.fleet.nodes))
        return Choice(found.plan.layout, found.reason, both, (found.plan,), found.speeds)
    if lacking := _lacking(spec.model, spec.train, spec.placement, slots, mixed.smallest(known), there):
        raise MemoryLacking(lacking.message, hint=lacking.hint)
    return _by_size(spec, fleet)


@functools.lru_cache(maxsize=64)
def _by_cost(
    model: ModelSpec, train: TrainSpec, policy: PlacementPolicy, slots: int, kind: Kind
) -> Choice | PlacementRefused | None:
    """On this kind; None where no layout is legal there. Asked at every pass of a queue, and so kept."""
    plans = ranking.every(model, train, kind.cluster(slots, policy))
    if not plans:
        return _lacking(model, train, policy, slots, kind, kind.fleet.slots)
    placed = tuple(itertools.islice(placeable(plans, kind, policy), SHOWN))
    if not placed:
        return PlacementRefused(_refused(plans[0].layout, kind.fleet, policy, kind.device) or "")
    return Choice(placed[0].layout, reasons.best(placed, kind.gpu), kind.fleet, placed)


@functools.lru_cache(maxsize=64)
def _lacking(
    model: ModelSpec, train: TrainSpec, policy: PlacementPolicy, slots: int, kind: Kind, there: int
) -> MemoryLacking | None:
    """Where every legal layout needs more memory than this kind has. `there`: slots that a larger job could ask for."""
    cluster = kind.cluster(slots, policy)
    lean = ranking.leanest(model, train, cluster)
    if lean is None or lean[1] <= ranking.estimating(model, train, cluster).limit:
        return None
    more = ranking.enough(model, train, cluster)
    return MemoryLacking(reasons.lacking(lean[0], lean[1], slots, kind.gpu), hint=reasons.enough(more, there))


def placeable(plans: Sequence[Plan], kind: Kind, policy: PlacementPolicy) -> Iterator[Plan]:
    """Those that its empty nodes have places for, which is a matter of dp, pp and tp alone."""
    fits: dict[tuple[int, int, int], bool] = {}
    for plan in plans:
        sizes = (plan.layout.dp, plan.layout.pp, plan.layout.tp)
        if sizes not in fits:
            fits[sizes] = _refused(plan.layout, kind.fleet, policy, kind.device) is None
        if fits[sizes]:
            yield plan


def _by_size(spec: JobSpec, fleet: Fleet) -> Choice:
    candidates = _full(spec)
    if not candidates:
        raise PlacementRefused(f"no layout of this model and batch uses all {spec.resources.slots} slots")
    for layout in candidates:
        if _refusal(spec, layout, fleet) is None:
            ranks = layout.pp * layout.tp
            reason = f"{layout} uses all {layout.world} slots with the fewest model-parallel ranks, {ranks}"
            return Choice(layout, reason, fleet)
    raise PlacementRefused(_refusal(spec, candidates[0], fleet) or "")


def check_fits(spec: JobSpec, fleet: Fleet, figures: Figures = kinds.known) -> None:
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
        chosen_, _ = choose(spec, fleet, figures)
    except MemoryLacking as refused:
        raise UserError(refused.message, hint=refused.hint, field="resources.slots") from None
    except PlacementRefused as refused:
        raise UserError(refused.message, hint=_working(spec, fleet), field="resources.slots") from None
    problem = _refusal(spec, chosen_, fleet)
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
    return _refused(layout, fleet, spec.placement, spec.resources.device)


def _refused(layout: ParallelLayout, fleet: Fleet, policy: PlacementPolicy, device: str) -> str | None:
    try:
        placement.place(layout, fleet, frozenset(), policy, device)
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
