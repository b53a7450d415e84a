"""How fast this rank's device is at one fixed piece of work, now and then: ranks that should be alike can be compared.

A step's own time can't tell them apart, since every rank waits for the slowest. The work is a product of two square
matrices, a few milliseconds on a CPU's core and under one on a GPU; a device that is throttled, or shared with what
nobody knows of, takes longer for it. On a CPU only the time counts that the thread had a core, which others want too.
Nothing is waited for on a GPU: a beat tells of the one before it.
"""

from __future__ import annotations

import time

import torch

EVERY_S = 0.25
SIDE = {"cpu": 256, "cuda": 4096}
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


class Pulse:
    def __init__(self, device: torch.device, every_s: float = EVERY_S) -> None:
        self.device, self.every_s, self.last = device, every_s, float("-inf")
        side, dtype = SIDE[device.type], DTYPE[device.type]
        self.matrix = torch.ones(side, side, dtype=dtype, device=device) / side
        self.out = torch.empty_like(self.matrix)
        self.events: tuple[torch.Event, torch.Event] | None = None
        self.took: float | None = None

    def beat(self) -> float | None:
        """Do the work where it is due. Seconds that it took the last time; None before that is known."""
        now = time.perf_counter()
        if now - self.last >= self.every_s:
            self.last = now
            if self.device.type == "cpu":
                began = time.thread_time()
                torch.mm(self.matrix, self.matrix, out=self.out)
                self.took = time.thread_time() - began
            else:
                self._on_a_stream()
        return self.took

    def _on_a_stream(self) -> None:
        if self.events is not None:
            if not self.events[1].query():
                return
            self.took = self.events[0].elapsed_time(self.events[1]) / 1000
        begin, end = (torch.Event(device=self.device, enable_timing=True) for _ in range(2))
        begin.record()
        torch.mm(self.matrix, self.matrix, out=self.out)
        end.record()
        self.events = begin, end
