"""The kinds of device of a fleet whose figures are known, each with its nodes and as a cluster of the cost model.

Where nodes, domains or racks of a kind differ in size, the size that most of its slots are in stands for all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Set

from service.contracts.cluster import Fleet, Node
from service.contracts.job import PlacementPolicy
from service.core.plan import hardware
from service.core.plan.cluster import Cluster
from service.core.plan.hardware import Gpu

Figures = Callable[[str], Gpu | None]
"""Of a device by its name; None where none are known."""


def known(name: str) -> Gpu | None:
    """The hardware table, without the CPU: a slot's figures there are an order of magnitude."""
    gpu = hardware.find(name)
    return None if gpu is None or gpu.family == "cpu" else gpu


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    name: str  # as the nodes call it
    gpu: Gpu
    fleet: Fleet  # its nodes

    @property
    def device(self) -> str:
        return self.fleet.nodes[0].device

    def free(self, taken: Set[tuple[str, int]]) -> int:
        own = {node.id for node in self.fleet.nodes}
        return self.fleet.slots - sum(node in own for node, _ in taken)

    def cluster(self, slots: int, policy: PlacementPolicy) -> Cluster:
        """Of so many of its GPUs. A tp group may use what `policy` lets it: a node, or an NVLink domain."""
        nodes = self.fleet.nodes
        node = _usual(one.slots for one in nodes)
        domain = node if policy.tp == "node" else _usual(_sizes((one.domain_key, one) for one in nodes))
        rack = _usual(_sizes((one.rack_key, one) for one in nodes))
        return Cluster(self.gpu, slots, gpus_per_node=node, domain=domain, rack=rack)


def of(fleet: Fleet, device: str, figures: Figures = known) -> tuple[Kind, ...]:
    """In the order of the fleet. None of devices that no figures are known of: of CPUs a probe has some."""
    nodes: dict[str, list[Node]] = defaultdict(list)
    for node in fleet.nodes:
        if node.device == device and node.slots:
            nodes[node.accelerator].append(node)
    found = ((name, figures(name if device == "gpu" else device), Fleet(tuple(own))) for name, own in nodes.items())
    return tuple(Kind(name, gpu, own) for name, gpu, own in found if gpu is not None)


def _sizes(members: Iterable[tuple[str, Node]]) -> Iterable[int]:
    slots: Counter[str] = Counter()
    for key, node in members:
        slots[key] += node.slots
    return slots.values()


def _usual(sizes: Iterable[int]) -> int:
    counts = Counter(sizes)
    return max(counts, key=lambda size: (counts[size] * size, size))
