"""What a snapshot of the training state costs: bytes of a GPU and node, and seconds of each copy. Not when to take one.

A snapshot has what is in shards: parameters in fp32 and the optimizer's moments, each element once in a replica group.
It goes from the device to its host, which the step waits for, and then to a peer on another node, behind later steps.
"""

from __future__ import annotations

import dataclasses

from service.core.plan import memory, stages
from service.core.plan.cluster import Cluster
from service.core.plan.layout import Layout
from service.core.plan.shape import Shape
from service.core.plan.stack import OWN, Stack

STATE_BYTES = 12
"""Of a parameter: fp32 and two moments."""


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    gpu_bytes: float  # of the fullest rank
    node_bytes: float
    copy_s: float
    send_s: float

    def share(self, step_s: float, every: int) -> float:
        """Of the time, where one is taken every so many steps."""
        return self.copy_s / (every * step_s)


def of(shape: Shape, layout: Layout, cluster: Cluster, stack: Stack = OWN) -> Snapshot:
    shards = layout.dp * layout.cp / layout.replicate
    copies = max(1.0, shards * layout.tp / (layout.ep * layout.expert_tp))
    most = 0.0
    for held in stages.held(layout, shape.layers, shape.dense_layers, 0.0):
        common, routed = memory.parameters(shape, layout, held)
        most = max(most, STATE_BYTES * (common / shards + routed / copies))
    return Snapshot(
        gpu_bytes=most,
        node_bytes=most * min(cluster.gpus_per_node, layout.world),
        copy_s=most / cluster.gpu.host,
        send_s=most / (cluster.nic * stack.rates.nic),
    )
