"""Claims of the literature and of talks about large training runs, each computed and agreed with or disputed.

Every claim is a function that returns its own line, so that its numbers are those of the cost model of today.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from service.core.plan import cost, schedule, shape, stages
from service.core.plan.cluster import Cluster
from service.core.plan.cost import Estimate
from service.core.plan.layout import Layout
from service.core.plan.shape import Shape
from service.core.plan.stack import STACKS, fit
from workers import bubble
from workers.models.spec import ModelSpec
from workers.spec import ParallelLayout

LLAMA_70B = shape.of(ModelSpec.model_validate({"preset": "llama3-70b"}))
GPT_175B = shape.of(ModelSpec.model_validate({"preset": "gpt3-175b"}))
STACK = fit(STACKS["megatron-core-2024"])


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    claim: str
    agreed: bool
    computed: tuple[float, ...]
    because: str

    @property
    def line(self) -> str:
        return f"{self.claim}: {'agreed' if self.agreed else 'disputed'}; {self.because}"


def every() -> list[Claim]:
    return [claim() for claim in CLAIMS]


def _estimate(model: Shape, layout: Layout, batch: int, cluster: Cluster) -> Estimate:
    return cost.estimate(model, layout, batch, cluster, STACK)


def tensor_across_nodes() -> Claim:
    """Twice the ranks of tp in place of twice the stages."""
    found = []
    for gpu in ("A100-80GB", "H100-80GB"):
        cluster = Cluster.of(gpu, 256)
        inside = _estimate(LLAMA_70B, Layout(dp=4, pp=8, tp=8), 256, cluster)
        across = _estimate(LLAMA_70B, Layout(dp=4, pp=4, tp=16), 256, cluster)
        found.append(across.step_s / inside.step_s - 1)
    return Claim(
        "tp 16 across two nodes costs 30 to 50%",
        any(0.3 <= slower <= 0.5 for slower in found),
        tuple(found),
        f"Llama 70B with tp 16 x pp 4 in place of tp 8 x pp 8 is {found[0]:.0%} slower on 256 A100 and {found[1]:.0%} "
        "on 256 H100, each with a network card a GPU",
    )


def wrong_mapping() -> Claim:
    """Tensor-parallel groups that sit on more nodes than they need."""
    layout = Layout(dp=4, pp=8, tp=8, vpp=5, schedule="interleaved_1f1b")
    right, two, eight = (
        _estimate(LLAMA_70B, layout, 256, Cluster.of("H100-80GB", 256, domain=domain)).step_s for domain in (8, 4, 1)
    )
    return Claim(
        "a wrong physical mapping costs 20 to 30%",
        0.2 <= two / right - 1 <= 0.3,
        (two / right - 1, eight / right - 1),
        f"Llama 70B on 256 H100 is {two / right - 1:.0%} slower with each group of tp 8 on two nodes, "
        f"{eight / right - 1:.0%} with it on eight",
    )


def many_stages() -> Claim:
    """More stages, fewer replicas, one batch."""
    cluster = Cluster.of("H100-80GB", 1024)
    found = {
        pp: _estimate(GPT_175B, Layout(dp=1024 // 8 // pp, pp=pp, tp=8), 1024, cluster).mfu for pp in (4, 8, 16, 32)
    }
    drop = 1 - found[32] / found[16]
    said = ", ".join(f"{mfu:.1%} at {pp}" for pp, mfu in found.items())
    return Claim(
        "past 16 stages efficiency falls",
        drop > 0,
        tuple(found.values()),
        f"GPT-3 175B on 1,024 H100 at tp 8 and 1,024 samples has an MFU of {said} stages; it falls before 16 as well"
        if found[16] < found[8]
        else f"GPT-3 175B on 1,024 H100 at tp 8 and 1,024 samples has an MFU of {said} stages",
    )


def filled_pipeline() -> Claim:
    layout = ParallelLayout(pp=16)
    few, many = bubble.fraction(layout, 16), bubble.fraction(layout, 64)
    return Claim(
        "as many micro-batches as stages fill the pipeline",
        few < 0.05,
        (few, many),
        f"16 micro-batches at 16 stages leave ranks idle for {few:.0%} of a step, four times as many for {many:.0%}",
    )


def zero_under_pipelines() -> Claim:
    """What a GPU saves by sharding gradients and parameters too, beside tp and pp."""
    cluster = Cluster.of("H100-80GB", 1024)
    found = {
        zero: max(
            stage.weights + stage.gradients + stage.optimizer
            for stage in _estimate(GPT_175B, Layout(dp=16, pp=8, tp=8, zero=zero), 1024, cluster).memory
        )
        for zero in (0, 1, 2, 3)
    }
    gained, left = found[0] - found[1], found[1] - found[3]
    whole = cluster.gpu.memory
    return Claim(
        "zero 2 and 3 gain little under tp and pp",
        left < gained,
        tuple(found[zero] / 1e9 for zero in (0, 1, 2, 3)),
        f"GPT-3 175B at dp 16 x tp 8 x pp 8 keeps {found[0] / 1e9:.0f} GB of states a GPU at zero 0, "
        f"{found[1] / 1e9:.0f} at 1, {found[2] / 1e9:.0f} at 2, {found[3] / 1e9:.0f} at 3: beyond 1 there is "
        f"{left / whole:.0%} of a GPU to gain, for traffic in every micro-batch",
    )


def adam_bytes() -> Claim:
    total = 70e9 * 12
    return Claim(
        "Adam at 12 bytes a parameter is 840 GB for 70B",
        round(total / 1e9) == 840,
        (total,),
        f"fp32 parameters and two moments of 70e9 parameters are {total / 1e9:.0f} GB, "
        f"{total / 512 / 1e9:.1f} a GPU in shards over 512",
    )


def activations_in_flight() -> Claim:
    """Layers' worth of one micro-batch's activations that the first stage keeps, over the model's."""
    layout = Layout(pp=8)
    held = stages.held(layout, LLAMA_70B.layers, LLAMA_70B.layers, 0.0)
    first, last = (
        schedule.in_flight(layout, rank, 64) * held[rank].dense / LLAMA_70B.layers for rank in (0, layout.pp - 1)
    )
    return Claim(
        "a stage holds 1/pp of the activations",
        abs(first - 1 / layout.pp) < 0.01,
        (first, last),
        f"under 1F1B the first of 8 stages has 8 micro-batches in flight and keeps {first:.0%} of what one GPU would "
        f"without a pipeline; only the last one keeps {last:.1%}",
    )


CLAIMS: tuple[Callable[[], Claim], ...] = (
    tensor_across_nodes,
    wrong_mapping,
    many_stages,
    filled_pipeline,
    zero_under_pipelines,
    adam_bytes,
    activations_in_flight,
)
