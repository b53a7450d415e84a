"""Which sizes and layouts a job may have beside the one it wants, and whether a larger one pays for its pause.

All at the same global batch. A layout that the user named changes in dp only. One that was planned keeps its tp, then
its pp; other pipelines only where it is known that they fit: on the CPU, or where the cost model knows the GPU. Knows
one job and the nodes, not who else waits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from pydantic import ValidationError

from service.contracts.cluster import Fleet
from service.contracts.errors import PlacementRefused
from service.contracts.job import JobSpec
from service.core import placement, sticky
from service.core.plan import kinds, ranking, search
from service.core.plan import layout as plan_layouts
from service.core.plan.search import Choice
from service.core.state import Job, Placement, Taken
from workers import bubble
from workers.models.spec import divisors
from workers.spec import ParallelLayout, layout_problem

PAUSE_S = 15.0
"""What a pause is taken to cost as long as the job has had none."""

SIZES = 64
"""The planner is asked for so many sizes of a job, or a few more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """A layout, where it is placed, and why this one."""

    layout: ParallelLayout
    placement: Placement
    why: str


def slots(job: Job) -> int:
    """That the job wants."""
    return job.wanted_slots or job.spec.resources.slots


def least(job: Job) -> int:
    """Fewest slots that it may run on."""
    bounds = job.spec.resources.elastic
    return slots(job) if bounds is None else min(bounds.min_slots, slots(job))


def most(job: Job) -> int:
    """Most slots that it takes where nobody waits for them; never more than a user asked for since."""
    bounds = job.spec.resources.elastic
    return slots(job) if bounds is None or job.wanted_slots else max(slots(job), bounds.max_slots or 0)


def asking(job: Job) -> JobSpec:
    """The spec as it would be if the user had written what is wanted now."""
    if job.wanted_slots is None and job.wanted_layout is None:
        return job.spec
    return asking_for(job.spec, slots(job), job.wanted_layout)


def asking_for(spec: JobSpec, count: int, layout: ParallelLayout | None) -> JobSpec:
    """The spec with another size. Of a named layout dp follows; PlacementRefused where that can't be."""
    parallel: ParallelLayout | str = layout or spec.parallel
    if isinstance(parallel, ParallelLayout) and parallel.world != count:
        resized = _sized(parallel, count, spec)
        if resized is None:
            ranks = parallel.pp * parallel.tp
            raise PlacementRefused(
                f"{parallel} can't be made one of {count} slots by its dp alone",
                hint=f"a multiple of its {ranks} model-parallel ranks that the global batch allows, or another layout",
            )
        parallel = resized
    resources = spec.resources.model_copy(update={"slots": count})
    return spec.model_copy(update={"resources": resources, "parallel": parallel})


def wanted(job: Job, fleet: Fleet, taken: Taken) -> Fit:
    """The job with all the slots that it wants. PlacementRefused says why not."""
    spec = asking(job)
    before = job.layout
    if spec.parallel == "auto" and before is not None and before.world == slots(job) and not before.replica_weights:
        try:
            return Fit(before, _placed(job, before, fleet, taken), f"{before} as before")
        except PlacementRefused:
            pass
    choice = search.chosen(spec, fleet, taken)
    return Fit(choice.layout, _placed(job, choice.layout, choice.fleet, taken, choice), choice.reason)


def largest(job: Job, fleet: Fleet, taken: Taken, above: int, below: int, why: str) -> Fit | None:
    """The largest legal layout of more than `above` and fewer than `below` slots that can be placed now; of equally
    large ones the fastest."""
    for layout in _layouts(job, fleet, taken, above, below):
        try:
            placed = _placed(job, layout, fleet, taken)
        except PlacementRefused:
            continue
        return Fit(layout, placed, sentence(job, layout, why))
    return None


def rescale_preview(
    job: Job, count: int, layout: ParallelLayout | None, fleet: Fleet, taken: Taken
) -> Choice | PlacementRefused:
    """What a request to rescale would lead to now, or why it can't be met yet. `taken`: by other jobs."""
    asked = dataclasses.replace(job, wanted_slots=count, wanted_layout=layout)
    try:
        fit = wanted(asked, fleet, taken)
    except PlacementRefused as refused:
        return refused
    if fit.layout == job.layout:
        return Choice(fit.layout, f"runs so already: {fit.layout}", fleet)
    pause = f"a pause of about {pause_s(job):.0f} s"
    return Choice(fit.layout, f"{fit.layout} on {fit.layout.world} slots after {pause}: {fit.why}", fleet)


def sentence(job: Job, layout: ParallelLayout, why: str) -> str:
    size = f"{layout.world} of {slots(job)} slots" if layout.world < slots(job) else f"{layout.world} slots"
    return f"{size}: {why}; {layout} at the same global batch of {job.spec.train.global_batch}"


def cost(layout: ParallelLayout, global_batch: int) -> float:
    """Of a step, in any unit: the longest replica's micro-batches with their waiting, over its ranks."""
    runs = max(layout.runs(global_batch))
    return runs * layout.micro_batch / (1 - bubble.fraction(layout, runs)) / (layout.pp * layout.tp)


def gain_s(job: Job, layout: ParallelLayout) -> float:
    """Seconds that the remaining steps would take less under `layout`."""
    if job.layout is None or job.step_s is None:
        return 0.0
    batch = job.spec.train.global_batch
    remaining_s = (job.spec.train.steps - job.step) * job.step_s
    return remaining_s * (1 - cost(layout, batch) / cost(job.layout, batch))


def pause_s(job: Job) -> float:
    """What stopping and starting again took last time."""
    over = (one.recover_s - one.spent.suspended_s for one in reversed(job.incidents) if one.recover_s is not None)
    return next(over, PAUSE_S)


def pays(job: Job, layout: ParallelLayout) -> bool:
    return gain_s(job, layout) > 2 * pause_s(job)


def _placed(job: Job, layout: ParallelLayout, fleet: Fleet, taken: Taken, choice: Choice | None = None) -> Placement:
    near = job.kept or job.placement
    same = layout == job.layout and not layout.replica_weights
    resources, speeds = job.spec.resources, choice.speeds if choice else None
    return sticky.place(layout, fleet, taken, job.spec.placement, resources.device, speeds, near, same)


def _layouts(job: Job, fleet: Fleet, taken: Taken, above: int, below: int) -> Iterator[ParallelLayout]:
    """Largest first."""
    spec = asking(job)
    there = {node.id: node.slots for node in fleet.nodes if node.device == spec.resources.device}
    top = min(below - 1, sum(there.values()) - sum(node in there for node, _ in taken))
    if isinstance(spec.parallel, ParallelLayout):
        yield from _fewer_replicas(spec, spec.parallel, fleet, taken, above, top)
    elif job.layout is None:
        yield from _planned(spec, fleet, taken, above, top)
    elif known := kinds.of(fleet, spec.resources.device):
        kept = next(_fewer_replicas(spec, job.layout, fleet, taken, above, top, known), None)
        better = _planned(spec, fleet, taken, max(above, kept.world if kept else 0), top, job.layout.tp)
        yield from better
        if kept is not None:
            yield kept
    else:
        yield from _other_pipelines(spec, job.layout, above, top)


def _fewer_replicas(
    spec: JobSpec,
    base: ParallelLayout,
    fleet: Fleet,
    taken: Taken,
    above: int,
    top: int,
    known: tuple[kinds.Kind, ...] = (),
) -> Iterator[ParallelLayout]:
    ranks = base.pp * base.tp
    room = placement.room(base, fleet, taken, spec.placement, spec.resources.device)
    for dp in range(min(top // ranks, room), above // ranks, -1):
        made = _with(base, spec, dp=dp)
        if made is not None and all(_fits_memory(made, spec, kind) for kind in known):
            yield made


def _planned(
    spec: JobSpec, fleet: Fleet, taken: Taken, above: int, top: int, tp: int | None = None
) -> Iterator[ParallelLayout]:
    """As the planner would for a job of each size; with `tp` only such layouts."""
    unit = tp or 1
    stride = unit * max(1, (top - above) // unit // SIZES)
    for count in range(top // unit * unit, above, -stride):
        try:
            choice = search.chosen(asking_for(spec, count, None), fleet, taken)
        except PlacementRefused:
            continue
        if choice.speeds is None and tp in (None, choice.layout.tp):
            yield choice.layout


def _other_pipelines(spec: JobSpec, base: ParallelLayout, above: int, top: int) -> Iterator[ParallelLayout]:
    """With the same tp. Where memory is not known, no rank is given more of the model than it had."""
    batch, tp = spec.train.global_batch, base.tp
    for world in range(top // tp * tp, above, -tp):
        found = []
        for pp in divisors(world // tp, spec.model.layers):
            dp = world // tp // pp
            if batch // dp < pp or (spec.resources.device == "gpu" and pp < base.pp):
                continue
            made = _with(base, spec, dp=dp) if pp == base.pp else _with(base, spec, dp=dp, pp=pp, **_PLAIN)
            if made is not None:
                found.append(made)
        yield from sorted(found, key=lambda one: (cost(one, batch), one.pp != base.pp, one.pp))


_PLAIN = {"schedule": "1f1b", "vpp": 1, "stage_layers": None}
"""What a pipeline of another length begins with."""


def _sized(base: ParallelLayout, count: int, spec: JobSpec) -> ParallelLayout | None:
    ranks = base.pp * base.tp
    return None if count % ranks else _with(base, spec, dp=count // ranks)


def _with(base: ParallelLayout, spec: JobSpec, dp: int, **changes: object) -> ParallelLayout | None:
    """With another dp, and what depends on it made to fit; None where that can't train the job."""
    replicate = dp if base.replicate == base.dp else base.replicate
    if dp % replicate or dp < 1:
        return None
    ep = math.gcd(base.ep, dp // replicate * base.tp)
    weights = base.replica_weights if dp == base.dp else None
    fields = {**base.model_dump(), "dp": dp, "replicate": replicate, "ep": ep, "replica_weights": weights, **changes}
    try:
        made = ParallelLayout.model_validate(fields)
    except ValidationError:
        return None
    return made if layout_problem(made, spec.model, spec.train) is None else None


def _fits_memory(layout: ParallelLayout, spec: JobSpec, kind: kinds.Kind) -> bool:
    estimator = ranking.estimating(spec.model, spec.train, kind.cluster(layout.world, spec.placement))
    return estimator.fits(estimator.memory(plan_layouts.of(layout, spec.model, spec.train.global_batch)))
