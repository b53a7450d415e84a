from __future__ import annotations

from typing import Any

import pytest

from service.contracts.cluster import CONTROL, NODE_LABEL, NVLINK_LABEL, RACK_LABEL, ROLE_LABEL, ZONE_LABEL, Node
from service.runtime import watcher

pytestmark = pytest.mark.ray

PLACE = {NODE_LABEL: "n1", RACK_LABEL: "r1", ZONE_LABEL: "z1"}


def row(resources: dict[str, float], labels: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    """As `ray.nodes()` tells of a node."""
    return {
        "NodeID": "abcdef0123456789",
        "Alive": True,
        "NodeManagerAddress": "10.0.0.7",
        "NodeManagerHostname": "host",
        "Resources": {"memory": 1e9, "object_store_memory": 1e9, "node:10.0.0.7": 1.0, **resources},
        "Labels": {"ray.io/node-id": "abcdef0123456789", **(labels or {})},
        **changes,
    }


ROWS = [
    (row({"CPU": 64.0, "GPU": 8.0}, PLACE), Node("abcdef0123456789", "n1", 8, "r1", "z1", "gpu", "10.0.0.7")),
    (row({"CPU": 4.0}, PLACE), Node("abcdef0123456789", "n1", 4, "r1", "z1", "cpu", "10.0.0.7")),
    (row({"CPU": 4.0, "GPU": 0.0}, PLACE), Node("abcdef0123456789", "n1", 4, "r1", "z1", "cpu", "10.0.0.7")),
    (
        row({"GPU": 4.0}, PLACE | {NVLINK_LABEL: "nv3", "ray.io/accelerator-type": "H100"}),
        Node("abcdef0123456789", "n1", 4, "r1", "z1", "gpu", "10.0.0.7", "nv3", "H100"),
    ),
    (row({"CPU": 4.0}), Node("abcdef0123456789", "host-abcdef", 4, "", "", "cpu", "10.0.0.7")),
    (row({"CPU": 4.0}, {RACK_LABEL: "r1"}), Node("abcdef0123456789", "host-abcdef", 4, "r1", "", "cpu", "10.0.0.7")),
    (row({}), Node("abcdef0123456789", "host-abcdef", 0, "", "", "cpu", "10.0.0.7")),
    (row({"CPU": 0.5}), Node("abcdef0123456789", "host-abcdef", 0, "", "", "cpu", "10.0.0.7")),
]


@pytest.mark.parametrize(("told", "node"), ROWS)
def test_a_row_is_a_node(told: dict[str, Any], node: Node) -> None:
    assert watcher.node(told) == node


def test_a_row_without_labels_is_a_node_without_a_place() -> None:
    told = row({"CPU": 2.0})
    del told["Labels"]
    assert watcher.node(told) == Node("abcdef0123456789", "host-abcdef", 2, address="10.0.0.7")


def named(name: str, cpus: float = 2.0, **changes: Any) -> dict[str, Any]:
    return row({"CPU": cpus}, {NODE_LABEL: name}, NodeID=f"id-{name}", **changes)


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([], []),
        ([named("b"), named("a")], ["a", "b"]),
        ([named("a"), named("dead", Alive=False)], ["a"]),
        ([named("a"), named("head", cpus=0.0)], ["a"]),
        ([named("a"), {"NodeID": "x", "Alive": False, "Resources": {}}], ["a"]),
        ([row({"CPU": 2.0}, {ROLE_LABEL: CONTROL, NODE_LABEL: "control"}), named("a")], ["a"]),
        ([row({"CPU": 2.0}, {ROLE_LABEL: "train", NODE_LABEL: "b"})], ["b"]),
    ],
)
def test_the_fleet_is_what_can_hold_ranks(rows: list[dict[str, Any]], names: list[str]) -> None:
    assert [node.name for node in watcher.of(rows).nodes] == names


@pytest.mark.parametrize(
    ("draining", "until"), [({}, None), ({"abcdef0123456789": 1_700_000_030_500}, 1_700_000_030.5)]
)
def test_a_node_that_was_given_notice_says_until_when(draining: dict[str, int], until: float | None) -> None:
    (found,) = watcher.of([row({"CPU": 2.0}, PLACE)], draining).nodes
    assert found.draining == until
