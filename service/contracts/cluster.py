"""The fleet as the core sees it: nodes with slots and a place."""

from __future__ import annotations

import dataclasses

ZONE_LABEL = "phalanx.io/zone"
RACK_LABEL = "phalanx.io/rack"
NODE_LABEL = "phalanx.io/node"
NVLINK_LABEL = "phalanx.io/nvlink-domain"
ROLE_LABEL = "phalanx.io/role"
CONTROL = "control"  # the role of a node that holds the controller, and no ranks


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


@dataclasses.dataclass(frozen=True, slots=True)
class Strike:
    """Something that a node is to blame for."""

    at: float
    kind: str


@dataclasses.dataclass(frozen=True, slots=True)
class NodeHealth:
    """What is held against a node, by its name: it outlives the node's id, and the controller."""

    strikes: tuple[Strike, ...] = ()  # newest last
    cooldown_until: float = 0.0
    cooldown_s: float = 0.0  # how long it is in all
    excluded: str = ""  # why nothing is placed on it, until an operator forgives it
    leave: bool = False  # gangs that stand on it are to leave it
    reboots: bool = False  # excluded until it comes back
    needs_probe: bool = False
    resets: tuple[int, ...] = ()  # devices to reset once they are free
    note: str = ""  # what was found last
    acted_at: float = 0.0  # when processes on it were last restarted for its health
