"""A layout as the cost model sees it: wider than what the engine runs, so that what others ran can be estimated too.

It knows context parallelism, expert tensor parallelism, and the schedules and kinds of recomputation of the literature.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from workers.models.spec import ModelSpec
from workers.spec import ANY_COUNT, SINGLE_STAGE, ParallelLayout

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb", "zbv", "zb1", "zb2", "dualpipe"]
"""zb1 and zb2: ZB-1p and ZB-2p of Zero Bubble (arXiv 2401.10241); dualpipe: DeepSeek-V3 (2412.19437)."""

Recompute = Literal["none", "attention", "cheap", "half", "inner", "full"]
"""attention: scores and their sum, `selective` of arXiv 2205.05198; cheap: all but matrix products and attention,
`selective` of the engine; half: every second product too, as torchtitan; inner: attention and feed-forward network
without their collectives; full: the block."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1  # ranks that an expert is cut into
    vpp: int = 1
    micro_batch: int = 1
    schedule: Schedule = "1f1b"
    zero: int = 1
    replicate: int = 1
    sequence_parallel: bool = True
    recompute: Recompute = "none"
    recompute_share: float = 1.0  # of the layers
    stage_layers: tuple[int, ...] | Literal["weighed"] | None = None
    accumulation: int = 0  # micro-batches that a replica runs in a step; 0: its share of the batch

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp * self.cp

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    def micro_batches(self, global_batch: int) -> int:
        """Of the replica that has the most."""
        return self.accumulation or max(1, -(-global_batch // (self.dp * self.micro_batch)))


def runs(global_batch: int, dp: int, pp: int, micro_batch: int, schedule: str) -> int:
    """Micro-batches that the engine runs on its fullest replica, empty ones included: `ParallelLayout.runs` of equal
    replicas, without a list of all."""
    count = -(-(global_batch // micro_batch) // dp)
    if pp > 1 and schedule not in ANY_COUNT:
        unit = 1 if schedule in SINGLE_STAGE else pp
        return max(pp, -(-count // unit) * unit)
    return count


def of(parallel: ParallelLayout, model: ModelSpec, global_batch: int) -> Layout:
    """What the engine runs."""
    kinds: dict[str, Recompute] = {"none": "none", "selective": "cheap", "inner": "inner", "full": "full"}
    return Layout(
        dp=parallel.dp,
        pp=parallel.pp,
        tp=parallel.tp,
        ep=parallel.ep,
        vpp=parallel.vpp,
        micro_batch=parallel.micro_batch,
        schedule=parallel.schedule,
        zero=parallel.zero,
        replicate=parallel.replicate,
        sequence_parallel=parallel.splits_sequence(model.seq_len),
        recompute=kinds[parallel.recompute],
        stage_layers=parallel.stage_layers,
        accumulation=max(parallel.runs(global_batch))
        if parallel.replica_weights
        else runs(global_batch, parallel.dp, parallel.pp, parallel.micro_batch, parallel.schedule),
    )
