"""A plan as it is told: what a job would be on a fleet, with the cost model's figures. Starts nothing, asks nobody."""

from __future__ import annotations

from api.views import AlternativeView, EstimateView, MapView, PlanView, RankMemory, SnapshotView
from service.contracts.cluster import Fleet
from service.contracts.errors import PlacementRefused, UserError
from service.contracts.job import JobSpec
from service.core import placement
from service.core.plan import calibration, kinds, ranking, rankmap, reasons, search, shape, snapshot
from service.core.plan import layout as layouts
from service.core.plan.kinds import Figures, Kind
from service.core.plan.ranking import Plan
from service.core.plan.search import Choice
from service.core.state import Placement
from workers.checkpoint import memory
from workers.timings import Probe

MEMORY = ("weights", "gradients", "optimizer", "activations", "logits", "overhead", "total")


def made(spec: JobSpec, fleet: Fleet, tokens: float | None = None, probe: Probe | None = None) -> PlanView:
    """UserError where the job never fits this fleet, or has nothing to do with what was probed. `tokens`: what days and
    GPU-hours are for; default the job's."""
    if not fleet.nodes:
        raise UserError(
            "no fleet is known: no node was seen", hint="describe one: fleet, or --fleet FILE", field="fleet"
        )
    figures = _probed(spec, fleet, probe) if probe else kinds.known
    search.check_fits(spec, fleet, figures)
    choice = search.chosen(spec, fleet, figures=figures)
    device = spec.resources.device
    placed = placement.place(choice.layout, choice.fleet, frozenset(), spec.placement, device, choice.speeds)
    kind = _kind(spec, fleet, placed, figures)
    plan = choice.plans[0] if choice.plans else _estimated(spec, choice, kind)
    own = spec.train.steps * spec.train.global_batch * spec.model.seq_len
    return PlanView(
        job=spec.name,
        slots=spec.resources.slots,
        layout=choice.layout,
        described=reasons.described(choice.layout),
        chosen=spec.parallel == "auto",
        reason=choice.reason,
        estimate=_estimate(spec, plan, kind, tokens or own) if plan and kind else None,
        others=_others(spec, choice, plan, kind, figures) if plan and kind else (),
        map=tuple(map(_line, rankmap.lines(choice.layout, placed, fleet))),
    )


def _probed(spec: JobSpec, fleet: Fleet, probe: Probe) -> Figures:
    own, device = calibration.gpu(probe, spec.train.precision), spec.resources.device
    figures = calibration.figures(own)
    if all(kind.gpu is not own for kind in kinds.of(fleet, device, figures)):
        there = sorted({node.accelerator or node.device for node in fleet.nodes if node.device == device})
        raise UserError(
            f"the probe is of a {probe.device}; the fleet's {device} slots are {' and '.join(there) or 'none'}",
            hint="plan with a probe of the same kind, or without one",
            field="probe.device",
        )
    return figures


def _kind(spec: JobSpec, fleet: Fleet, placed: Placement, figures: Figures) -> Kind | None:
    """That the ranks stand on; of several the one with the least memory. None where no figures are known of one."""
    used = set(placed.nodes)
    names = {node.accelerator for node in fleet.nodes if node.id in used}
    known = [kind for kind in kinds.of(fleet, spec.resources.device, figures) if kind.name in names]
    return min(known, key=lambda kind: kind.gpu.memory) if len(known) == len(names) else None


def _estimated(spec: JobSpec, choice: Choice, kind: Kind | None) -> Plan | None:
    if kind is None:
        return None
    cluster = kind.cluster(choice.layout.world, spec.placement)
    return ranking.estimate(choice.layout, spec.model, spec.train, cluster)


def _estimate(spec: JobSpec, plan: Plan, kind: Kind, tokens: float) -> EstimateView:
    found, cluster = plan.estimate, kind.cluster(plan.layout.world, spec.placement)
    ranks = ({"rank": rank} | {name: getattr(held, name) for name in MEMORY} for rank, held in enumerate(found.memory))
    return EstimateView(
        accelerator=kind.gpu.name,
        step_s=found.step_s,
        parts=found.parts,
        bubble=found.bubble,
        mfu=found.mfu,
        tokens_per_s=found.tokens_per_s,
        tokens=tokens,
        days=found.days(tokens),
        gpu_hours=found.gpu_hours(tokens),
        device_bytes=kind.gpu.memory,
        usable_bytes=ranking.estimating(spec.model, spec.train, cluster).limit,
        fits=found.fits,
        memory=tuple(RankMemory.model_validate(rank) for rank in ranks),
        snapshot=_snapshot(spec, plan, kind),
    )


def _snapshot(spec: JobSpec, plan: Plan, kind: Kind) -> SnapshotView:
    """As the ranks would choose the interval."""
    seen = layouts.of(plan.layout, spec.model, spec.train.global_batch)
    cluster = kind.cluster(plan.layout.world, spec.placement)
    one = snapshot.of(shape.of(spec.model), seen, cluster, ranking.stack(spec.train))
    asked, step_s = spec.checkpoint.snapshot_every, plan.estimate.step_s
    every = memory.interval(one.copy_s, step_s, plan.layout.world) if asked == "auto" else asked
    return SnapshotView(
        every_steps=every,
        gpu_bytes=one.gpu_bytes,
        node_bytes=one.node_bytes,
        copy_s=one.copy_s,
        share=one.share(step_s, every) if every else 0.0,
    )


def _others(spec: JobSpec, choice: Choice, plan: Plan, kind: Kind, figures: Figures) -> tuple[AlternativeView, ...]:
    others = choice.plans[1:] if spec.parallel == "auto" else _instead(spec, kind, figures)
    return tuple(
        AlternativeView(
            layout=other.layout,
            described=reasons.described(other.layout),
            step_s=other.estimate.step_s,
            mfu=other.estimate.mfu,
            memory_bytes=other.estimate.memory_bytes,
            ratio=other.estimate.step_s / plan.estimate.step_s,
            why=reasons.compared(other, plan),
        )
        for other in others
    )


def _instead(spec: JobSpec, kind: Kind, figures: Figures) -> tuple[Plan, ...]:
    """What would have been chosen on the same devices."""
    try:
        return search.chosen(spec.model_copy(update={"parallel": "auto"}), kind.fleet, figures=figures).plans
    except PlacementRefused:
        return ()


def _line(line: rankmap.Line) -> MapView:
    return MapView(
        racks=rankmap.names(line.racks),
        nodes=rankmap.names(line.nodes),
        slots=line.slots,
        held=line.held,
        text=str(line),
    )
