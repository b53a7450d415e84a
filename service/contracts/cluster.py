"""The fleet as the core sees it: nodes with slots and a place."""

from __future__ import annotations

import dataclasses

ZONE_LABEL = "phalanx.io/zone"
RACK_LABEL = "phalanx.io/rack"
NODE_LABEL = "phalanx.io/node"
NVLINK_LABEL = "phalanx.io/nvlink-domain"


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One alive machine. `id` is Ray's node id; `name` is for people."""

    id: str
    name: str
    slots: int
    rack: str = ""
    zone: str = ""
    device: str = "cpu"
    address: str = "127.0.0.1"
    nvlink: str = ""  # name of the NVLink domain, which may span nodes of a rack
    accelerator: str = ""  # kind of its GPUs, as Ray calls it: H100, A100-80G; empty: not known
    draining: float | None = None  # Unix seconds at which it goes: a notice was given

    @property
    def rack_key(self) -> str:
        """Without a rack label every node is its own rack."""
        return f"{self.zone}/{self.rack}" if self.rack else f"{self.zone}/node:{self.id}"

    @property
    def domain_key(self) -> str:
        """Without a label every node is its own NVLink domain."""
        return f"{self.zone}/{self.nvlink}" if self.nvlink else f"node:{self.id}"


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """The alive nodes, ordered by name."""

    nodes: tuple[Node, ...] = ()

    @property
    def slots(self) -> int:
        return sum(node.slots for node in self.nodes)

    def node(self, node_id: str) -> Node | None:
        return next((node for node in self.nodes if node.id == node_id), None)
