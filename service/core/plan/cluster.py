"""A cluster as the cost model sees it: alike GPUs in nodes, NVLink domains and racks, and the links between them.

Ranks are numbered as placement numbers them: tp next to each other, then cp, dp and pp, so that a group of `size` ranks
`stride` apart spans `size * stride` neighbours.
"""

from __future__ import annotations

import dataclasses

from service.core.plan import hardware


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """Of `gpus` devices. 0 stands for the GPU's usual node, domain and network card, and for one rack."""

    gpu: hardware.Gpu
    gpus: int
    gpus_per_node: int = 0
    domain: int = 0  # GPUs that NVLink joins; may span nodes
    rack: int = 0  # GPUs of a rack
    nic: float = 0.0  # bytes/s of a GPU's share of its node's network cards
    cross_rack: float = 1.0  # share of that which is left between racks

    def __post_init__(self) -> None:
        node = self.gpus_per_node or self.gpu.node
        object.__setattr__(self, "gpus_per_node", node)
        spans = self.gpu.domain > self.gpu.node  # NVLink between nodes
        object.__setattr__(self, "domain", self.domain or (self.gpu.domain if spans else node))
        object.__setattr__(self, "nic", self.nic or self.gpu.nic)
        if not 0 < self.cross_rack <= 1:
            raise ValueError(f"cross_rack {self.cross_rack} must be above 0 and at most 1")

    @classmethod
    def of(cls, name: str, gpus: int, **how: float) -> Cluster:
        """By the GPU's name; ValueError names the known ones."""
        gpu = hardware.find(name)
        if gpu is None:
            raise ValueError(f"no figures are known of {name!r}; there are {', '.join(hardware.GPUS)}")
        return cls(gpu, gpus, **how)  # type: ignore[arg-type]

    def in_domain(self, size: int, stride: int) -> bool:
        return size == 1 or size * stride <= self.domain

    def in_rack(self, size: int, stride: int) -> bool:
        return not self.rack or size == 1 or size * stride <= self.rack
