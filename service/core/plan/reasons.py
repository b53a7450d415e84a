"""Sentences that say why a layout was taken, or none, with the numbers of the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.core.plan.cost import USABLE, Estimate
from service.core.plan.hardware import GB, Gpu
from service.core.plan.ranking import Plan
from workers.spec import ParallelLayout

WORTH = 0.1  # of what two layouts differ by in all: parts that differ by less are not told
MOST_PARTS = 3


def described(layout: ParallelLayout) -> str:
    """Its sizes, and what of its choices is not the usual one."""
    words = [str(layout), layout.schedule] if layout.pp > 1 else [str(layout)]
    words.append(f"micro-batch {layout.micro_batch}")
    words += ["weighed stages"] * (layout.stage_layers == "weighed")
    words += [f"recompute {layout.recompute}"] * (layout.recompute != "none")
    words += [f"zero {layout.zero}"] * (layout.zero != 1)
    return ", ".join(words)


def figures(estimate: Estimate, gpu: Gpu) -> str:
    memory = f"{estimate.memory_bytes / GB:.3g} of {gpu.memory / GB:.3g} GB on the fullest {gpu.name}"
    return f"{estimate.step_s:.3g} s a step, MFU {estimate.mfu:.1%}, {memory}"


def best(plans: Sequence[Plan], gpu: Gpu) -> str:
    """Of the first; the second is told beside it."""
    first, *others = plans
    said = f"{described(first.layout)}: {figures(first.estimate, gpu)}"
    if not others:
        return f"{said}; no other layout fits and can be placed"
    return f"{said}; the next best is {described(others[0].layout)} with {others[0].estimate.step_s:.3g} s"


def mixed(layout: ParallelLayout, estimate: Estimate, shares: Mapping[str, tuple[int, int]]) -> str:
    """`shares`: replicas and micro-batches of a step on each kind."""
    on = ", ".join(f"{count} replicas on {kind} run {runs} micro-batches" for kind, (count, runs) in shares.items())
    return f"{described(layout)}: no kind of GPU has room alone; {on}; {estimate.step_s:.3g} s a step"


def compared(plan: Plan, to: Plan) -> str:
    """How much slower or faster, and in which parts of the step."""
    gap = plan.estimate.step_s - to.estimate.step_s
    share = abs(gap) / to.estimate.step_s
    if share < 0.001:
        return "as fast"
    names = dict.fromkeys([*plan.estimate.parts, *to.estimate.parts])
    differences = {name: plan.estimate.parts.get(name, 0.0) - to.estimate.parts.get(name, 0.0) for name in names}
    largest = sorted(names, key=lambda name: -abs(differences[name]))[:MOST_PARTS]
    told = [f"{name} {differences[name]:+.2g} s" for name in largest if abs(differences[name]) > WORTH * abs(gap)]
    return f"{share:.1%} {'slower' if gap > 0 else 'faster'}: {', '.join(told)}"


def lacking(layout: ParallelLayout, held: float, slots: int, gpu: Gpu) -> str:
    """`held`: bytes of its fullest device under the leanest layout."""
    return (
        f"no layout fits the memory of {slots} {gpu.name}: the leanest, {described(layout)}, needs {held / GB:.3g} GB "
        f"on one, and {gpu.memory * USABLE / GB:.3g} of {gpu.memory / GB:.3g} can be used"
    )


def enough(more: int | None, there: int) -> str:
    if more is None:
        return "a smaller model or seq_len would fit"
    has = f", and the fleet has {there} of these" if more > there else ""
    return f"resources.slots {more} would do{has}"
