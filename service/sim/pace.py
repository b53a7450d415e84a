"""How long a step takes under a layout, and what a copy of the state costs it.

One step's time is given, or estimated from the model's arithmetic; other replica counts follow from the micro-batches
of the longest replica and the schedule's bubble. Knows no links: communication is in the time that is given.
"""

from __future__ import annotations

import dataclasses

from service.contracts.errors import UserError
from service.contracts.job import JobSpec
from service.sim import clock
from workers import bubble, flops, hardware
from workers.spec import BYTE_VOCABULARY, ParallelLayout

MFU = 0.4  # of an estimate: Llama 3 405B reached 0.38 to 0.43 on 8,192 and 16,384 GPUs (arXiv 2407.21783, table 4)
STATE_BYTES = 12  # of a parameter: itself in fp32 and two moments of AdamW
COPY_OUT = 20e9  # bytes/s from a GPU to its host's memory, of the 32 to 64 that PCIe 4 and 5 have in theory


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    full: ParallelLayout
    step_us: int  # of a step under `full`
    global_batch: int

    def of(self, layout: ParallelLayout) -> int:
        """Microseconds of a step under a layout of the same tp and pp."""
        return max(1, round(self.step_us * self._passes(layout) / self._passes(self.full)))

    def _passes(self, layout: ParallelLayout) -> float:
        """The longest replica's time in micro-batches of one stage, waiting included."""
        most = max(layout.runs(self.global_batch))
        return most / (1 - bubble.fraction(layout, most))


def estimated_s(spec: JobSpec, slots: int, gpu: str) -> float:
    """Of a step, from the model's FLOPs at a usual MFU. UserError where the device's peak is not known."""
    peak = hardware.peak(gpu, spec.train.precision) if spec.resources.device == "gpu" else None
    if peak is None:
        what = gpu if spec.resources.device == "gpu" else "a cpu"
        raise UserError(f"the time of a step on {what} is not known", hint="give it with --step-s")
    per_token = flops.per_token(spec.model, _vocabulary(spec), spec.model.seq_len, "causal")
    return per_token * spec.model.seq_len * spec.train.global_batch / (slots * peak * MFU)


def copy_s(spec: JobSpec, slots: int) -> float:
    """Seconds that the ranks wait while their parts of the state go to the host's memory."""
    return flops.parameters(spec.model, _vocabulary(spec)) * STATE_BYTES / slots / COPY_OUT


def made(spec: JobSpec, layout: ParallelLayout, step_s: float) -> Pace:
    return Pace(layout, clock.us(step_s), spec.train.global_batch)


def _vocabulary(spec: JobSpec) -> int:
    return spec.model.vocab_size or BYTE_VOCABULARY
