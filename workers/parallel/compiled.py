"""Blocks compiled by torch.compile, with caches on disk that outlive the process; and the environment of a rank.

Knows no model and starts nothing. A rank that starts again traces its blocks again, and finds in the folder what the
compiler made of them the last time. Zero-bubble schedules split the backward pass, which a compiled block can't do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

FLIGHT_ENTRIES = 2000  # of the newest collectives, in memory


def apply(blocks: Iterable[nn.Module], enabled: bool) -> None:
    """Compile the forward pass of each block, in place, and so its backward pass; names and parameters stay.

    After `recompute.apply`, so that what is computed again is chosen by the compiler; before `data.apply`, so that
    gathering stays outside. The work is done at the first call of each shape.
    """
    if not enabled:
        return
    for block in blocks:
        block.forward = torch.compile(block.forward)  # not the module: its hooks would be compiled too


def environment(folder: Path, timeout_s: float, interface: str | None = None) -> Mapping[str, str]:
    """What to set before a rank joins its world: `folder` is this node's and outlives the process.

    A process whose NCCL watchdog hangs for `timeout_s` is aborted. A collective that runs into its group's timeout
    leaves the last ones of each rank in `folder`/flight. Without `interface` NCCL and gloo choose their network
    themselves.
    """
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),  # Triton's too
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCH_FR_BUFFER_SIZE": str(FLIGHT_ENTRIES),
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "flight" / "rank_"),  # a file a rank
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "1",  # the dump needs it
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(1, round(timeout_s))),
    }
    if interface is not None:
        settings |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    return settings
