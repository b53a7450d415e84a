"""How well a step used the world's devices, and where this rank's time went. Knows neither torch nor what a step is."""

from __future__ import annotations

import dataclasses
import time

from workers import flops, hardware
from workers.spec import RunSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Throughput:
    """What one step of a run is worth, and what its devices could do."""

    flops: float  # model FLOPs of a step, of all replicas
    peak: float | None  # FLOP/s of all ranks' devices; None where it is not known

    @classmethod
    def of(cls, run: RunSpec, vocabulary: int, device: str) -> Throughput:
        """`device`: the name of this rank's device, taken to be that of all."""
        tokens = run.train.global_batch * run.model.seq_len
        one = hardware.peak(device, run.train.precision)
        work = tokens * flops.per_token(run.model, vocabulary, run.model.seq_len)
        return cls(work, None if one is None else one * run.parallel.world)

    def mfu(self, step_s: float) -> float | None:
        """Model FLOPs utilisation, by the convention of `workers.flops`; None where the peak is not known."""
        return None if self.peak is None else self.flops / step_s / self.peak


class Stopwatch:
    """Seconds of a step by the host's clock, part by part. It never waits for a device.

    So on a GPU a part should end where the host waits anyway; what the optimizer queued is in the next step's parts.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.began = self.last = time.perf_counter()
        self.parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """What passed since the last lap was `part`."""
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self.last
        self.last = now

    @property
    def total(self) -> float:
        """Seconds from the start to the last lap: the sum of the parts."""
        return self.last - self.began
