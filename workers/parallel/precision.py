"""Number formats: what parameters are kept in and products computed in, and the loss scale that fp16 needs.

Source: "Mixed Precision Training" (arXiv 1710.03740).
"""

from __future__ import annotations

import torch

from workers.spec import Precision

PARAMETERS = {"bf16": torch.float32, "fp16": torch.float32, "fp32": torch.float32, "float64": torch.float64}
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "float64": torch.float64}


class LossScale:
    """What the loss is multiplied by, so that fp16 holds small gradients: doubled after many good steps, halved when
    a gradient overflows. It moves by figures that all ranks agree on, so it is the same on all."""

    FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24
    GROWS_AFTER = 1000  # good steps in a row

    def __init__(self, precision: Precision) -> None:
        self.moves = precision == "fp16"
        self.value, self.good = (self.FIRST if self.moves else 1.0), 0

    def update(self, finite: bool) -> bool:
        """After a step. Whether the scale may have been why it was not finite."""
        if not self.moves:
            return False
        if not finite:
            excused = self.value > self.LEAST
            self.value, self.good = max(self.LEAST, self.value / 2), 0
            return excused
        self.good += 1
        if self.good == self.GROWS_AFTER:
            self.value, self.good = min(self.MOST, self.value * 2), 0
        return False

    def state(self) -> dict[str, float]:
        return {"scale": self.value, "good": self.good} if self.moves else {}

    def resume(self, state: dict[str, float]) -> None:
        if self.moves and state:
            self.value, self.good = float(state["scale"]), int(state["good"])
