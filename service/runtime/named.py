"""What there is of jobs on the cluster, by name: an actor is `job/node/...`, a placement group `job/node`.

Reads Ray's tables, which the head has; so that whoever comes new can find what an earlier one left. Keepers of
snapshots outlive gangs, and are left out.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

NAMESPACE = "phalanx"
CONTROLLER = "controller"  # the one actor that is no job's


def agents(uid: str) -> dict[str, Any]:
    """Node name -> agent of the job's gang, of those that Ray knows."""
    found = {name.split("/")[1]: handle(name) for name in names(uid) if name.endswith("/agent")}
    return {node: handle for node, handle in found.items() if handle is not None}


def jobs_held() -> set[str]:
    """Uids of all jobs that have an actor or a placement group on the cluster."""
    found = names() + [row["name"] for row in _live_groups() if "/" in row["name"]]  # snapshots hold no slot
    return {name.split("/")[0] for name in found}


def held(uid: str) -> list[str]:
    """Names of the actors and placement groups of one job's gang."""
    return [row["name"] for row in _live_groups() if row["name"].startswith(f"{uid}/")] + names(uid)


def groups(uid: str, nodes: Container[str] | None = None) -> list[PlacementGroup]:
    rows = [row for row in _live_groups() if row["name"].startswith(f"{uid}/")]
    rows = [row for row in rows if nodes is None or row["name"].split("/")[1] in nodes]
    return [PlacementGroup(ray.PlacementGroupID(bytes.fromhex(row["placement_group_id"]))) for row in rows]


def names(uid: str = "") -> list[str]:
    """Names of the actors of the gang of one job, or of all jobs. Keepers of snapshots outlive gangs."""
    rows = ray.util.list_named_actors(all_namespaces=True)
    return [
        row["name"]
        for row in rows
        if row["namespace"] == NAMESPACE
        and row["name"].startswith(f"{uid}/" if uid else "")
        and "/" in row["name"]
        and not row["name"].endswith("/snapshots")
    ]


def _live_groups() -> list[dict[str, Any]]:
    return [row for row in placement_group_table().values() if row["state"] != "REMOVED"]


def handle(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None  # gone since it was listed
