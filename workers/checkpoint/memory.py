"""The memory tier as a rank sees it: when a snapshot pays, and who keeps it. No torch.

A snapshot is a checkpoint whose shards are files in the memory of this node, copied to a peer. At most one is under
way: the next one is not begun before all ranks know the last one in both places, so that of the newest two
generations one is always whole. Knows no Ray: what stands behind `Memory` keeps, copies and serves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol

from workers.checkpoint.storage import Storage
from workers.reports import ShardSaved

CHEAP = 0.01  # share of a step's time that nobody minds
MTBF_S = 50_000 * 3600.0  # of one device: 419 interruptions of 16,384 GPUs in 54 days (Llama 3, section 3.3.4)


class Note(NamedTuple):
    """Of one rank, or summed over ranks."""

    busy: float = 0.0  # snapshots under way
    lacking: float = 0.0  # ranks that have no memory tier, or none with room
    cost_s: float = 0.0  # of the last snapshot
    step_s: float = 0.0  # of the last step
    pausing: float = 0.0  # ranks that were asked to end after this step
    saving: float = 0.0  # ranks that were asked to save this step to storage


class Memory(Protocol):
    """This node's keeper of a job's snapshots."""

    @property
    def storage(self) -> Storage:
        """Of the job: writes go to this node's memory, reads find what any node has."""

    @property
    def manifests(self) -> Sequence[str]:
        """Of whole snapshots to continue at, newest first."""

    def admit(self, nbytes: int) -> str:
        """Why snapshots of which this rank's part has so many bytes can't be kept; empty where they can."""

    def hold(self, record: ShardSaved) -> None:
        """Returns once the shard in `storage` is in its second place too, if it has one. OSError: it is not kept."""

    def pinned(self, record: ShardSaved) -> AbstractContextManager[Storage]:
        """Where the shard stays readable until the block ends, whatever comes after it."""


@dataclasses.dataclass(slots=True)
class Rhythm:
    """Decides, alike on all ranks from what they agreed on, after which steps a snapshot is taken."""

    every: Literal["auto"] | int
    devices: int
    last: int  # step of the last snapshot, or where the run continued

    def due(self, step: int, agreed: Note, wanted: bool = False) -> bool:
        """Whether to take one now. `wanted`: a durable save comes anyway, and begins with one where it can."""
        mean = (agreed.cost_s / self.devices, agreed.step_s / self.devices)
        every = self.every if self.every != "auto" else interval(*mean, self.devices)
        if agreed.busy or agreed.lacking or not every or not (wanted or step - self.last >= every):
            return False
        self.last = step
        return True


def interval(cost_s: float, step_s: float, devices: int) -> int:
    """Steps between snapshots: every one where it is cheap, else as many as make it so, but no more than Daly's
    optimum, the square root of twice the cost times the mean time between failures (J. T. Daly, 2006).

    Seconds that a snapshot costs a rank, and seconds of a step.
    """
    if step_s <= 0 or cost_s <= 0:
        return 1
    daly_s = math.sqrt(2 * cost_s * MTBF_S / devices)
    return max(1, math.ceil(min(cost_s / CHEAP, daly_s) / step_s))
