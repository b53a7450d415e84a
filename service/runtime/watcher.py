"""Ray's node table as a Fleet. Reads; never decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import ray
from ray._private.state import state

from service.contracts.cluster import (
    CONTROL,
    NODE_LABEL,
    NVLINK_LABEL,
    RACK_LABEL,
    ROLE_LABEL,
    ZONE_LABEL,
    Fleet,
    Node,
)

NOBODY: Mapping[str, int] = MappingProxyType({})
ACCELERATOR_LABEL = "ray.io/accelerator-type"  # Ray's own


def fleet() -> Fleet:
    """As Ray sees it now."""
    return of(ray.nodes(), state.get_draining_nodes())


def of(rows: Iterable[Mapping[str, Any]], draining: Mapping[str, int] = NOBODY) -> Fleet:
    """The alive nodes that can hold ranks, by name. Nodes of role `control` and nodes without a slot are left out.

    `draining`: node id -> Unix milliseconds at which a node that was given notice goes; 0 where none was named.
    """
    ours = [row for row in rows if row["Alive"] and row.get("Labels", {}).get(ROLE_LABEL) != CONTROL]
    nodes = [node(row, draining.get(row["NodeID"])) for row in ours]
    return Fleet(tuple(sorted((found for found in nodes if found.slots), key=lambda found: found.name)))


def node(row: Mapping[str, Any], deadline_ms: int | None = None) -> Node:
    """One row of Ray's table. A node with GPUs offers those; without, its CPUs."""
    labels, resources = row.get("Labels", {}), row.get("Resources", {})
    device = "gpu" if resources.get("GPU") else "cpu"
    return Node(
        id=row["NodeID"],
        name=labels.get(NODE_LABEL) or f"{row['NodeManagerHostname']}-{row['NodeID'][:6]}",
        slots=int(resources.get("GPU" if device == "gpu" else "CPU", 0)),
        rack=labels.get(RACK_LABEL, ""),
        zone=labels.get(ZONE_LABEL, ""),
        device=device,
        address=row["NodeManagerAddress"],
        nvlink=labels.get(NVLINK_LABEL, ""),
        draining=None if deadline_ms is None else deadline_ms / 1000,
        accelerator=labels.get(ACCELERATOR_LABEL, "") if device == "gpu" else "",
    )
