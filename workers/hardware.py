"""Peak dense FLOP/s of GPUs by the name that CUDA gives them, from NVIDIA's data sheets (figures without sparsity)."""

from __future__ import annotations

import re
from typing import Literal

PEAKS = (
    # a pattern of device names, the first that fits counts; TFLOP/s in half precision (bf16, fp16), fp32, float64
    (r"\bMIG\b", None),  # a slice of a GPU: its share is not in its name
    (r"\bA100\b", (312.0, 19.5, 19.5)),
    (r"\bH100\b.*\bPCIe\b", (756.0, 51.0, 51.0)),
    (r"\bH[12]00\b.*\bNVL\b", (835.0, 60.0, 60.0)),
    (r"\bG?H[12]00\b", (989.4, 66.9, 66.9)),
    (r"\bH800\b.*\bPCIe\b", (756.0, 51.0, 0.8)),
    (r"\bH800\b", (989.4, 66.9, 1.0)),
    (r"\bB200\b", (2250.0, 75.0, 37.0)),
    (r"\bGB200\b", (2500.0, 80.0, 40.0)),
)
"""fp32 is that of the plain cores, as torch multiplies unless TF32 is asked for; float64 that of the tensor cores."""

COLUMNS = {"bf16": 0, "fp16": 0, "fp32": 1, "float64": 2}


def peak(name: str, precision: Literal["bf16", "fp16", "fp32", "float64"]) -> float | None:
    """FLOP/s of one device, or None where no figure is known, as for any CPU."""
    for pattern, figures in PEAKS:
        if re.search(pattern, name, re.IGNORECASE):
            return figures[COLUMNS[precision]] * 1e12 if figures else None
    return None
