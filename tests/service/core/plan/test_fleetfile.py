from __future__ import annotations

from typing import Any

import pytest

from service.contracts.cluster import Node
from service.contracts.errors import UserError
from service.core.plan import fleetfile
from service.sim import fleet as simulated


def nodes(value: Any) -> tuple[Node, ...]:
    return fleetfile.parse(value).fleet().nodes


def node(name: str, slots: int = 8, accelerator: str = "H100", **fields: str) -> Node:
    return Node(name, name, slots, device="gpu", accelerator=accelerator, **fields)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"accelerator": "H100", "racks": [{"nodes": 2},
                                          {"nodes": 1, "slots": 4, "name": "old", "accelerator": "A100"}]},
         (node("n0", rack="r0"), node("n1", rack="r0"), node("n2", 4, "A100", rack="old"))),
        ({"accelerator": "H100", "racks": [{"nodes": 1, "count": 2}, {"nodes": 1}]},
         (node("n0", rack="r0"), node("n1", rack="r1"), node("n2", rack="r2"))),
        ({"accelerator": "H100", "nodes": [{"name": "a", "rack": "x", "zone": "z"}, {"slots": 4, "nvlink": "d"}]},
         (node("a", rack="x", zone="z"), node("n1", 4, nvlink="d"))),
        ({"accelerator": "H100", "nodes": 3, "slots": 4, "rack": 2},
         (node("n0", 4, rack="r0"), node("n1", 4, rack="r0"), node("n2", 4, rack="r1"))),
        ({"gpu": "H100", "nodes": 2}, (node("n0"), node("n1"))),
        ({"accelerator": "H100", "nodes": 4, "nvlink": 2, "rack": 4},
         tuple(node(f"n{i}", rack="r0", nvlink=f"d{i // 2}") for i in range(4))),
    ],
)  # fmt: skip
def test_fleets(value: Any, expected: tuple[Node, ...]) -> None:
    assert nodes(value) == expected


def test_nodes_without_a_rack_are_each_their_own() -> None:
    assert len({one.rack_key for one in nodes({"nodes": 3})}) == 3
    assert len({one.rack_key for one in nodes({"nodes": 3, "rack": 3})}) == 1


def test_a_fleet_of_the_simulator_is_one() -> None:
    value = {"nodes": 12, "slots": 2, "rack": 5, "device": "gpu", "gpu": "H100"}
    ours = [(one.slots, one.rack, one.device) for one in nodes(value)]
    assert ours == [(one.slots, one.rack, one.device) for one in simulated.parse(value).made()]


@pytest.mark.parametrize(
    ("value", "field", "says"),
    [
        ([], "fleet", "a mapping"),
        ({}, "fleet", "either racks or nodes"),
        ({"racks": [{"nodes": 1}], "nodes": 1}, "fleet", "either racks or nodes"),
        ({"racks": []}, "fleet", "either racks or nodes"),
        ({"nodes": []}, "fleet", "1 to 131,072 slots, not 0"),
        ({"nodes": 0}, "fleet.nodes", "greater than 0"),
        ({"nodes": 100_000, "slots": 8}, "fleet", "1 to 131,072 slots, not 800,000"),
        ({"racks": [{"nodes": 1000, "count": 1000}]}, "fleet", "1 to 131,072 slots, not 8,000,000"),
        ({"racks": [{"nodes": 1, "colour": "red"}]}, "fleet.racks.0.colour", "not permitted"),
        ({"racks": [{"slots": 8}]}, "fleet.racks.0.nodes", "required"),
        ({"nodes": [{"slots": 0}]}, "fleet.nodes.0.slots", "greater than 0"),
        ({"nodes": [{"name": "a"}, {"name": "a"}]}, "fleet", "two nodes are called a"),
        ({"nodes": [{"name": "n1"}, {}]}, "fleet", "two nodes are called n1"),
        ({"nodes": "many"}, "fleet.nodes", "integer"),
        ({"nodes": 1, "device": "tpu"}, "fleet.device", "'cpu' or 'gpu'"),
        ({"nodes": 1, "color": 1}, "fleet.color", "not permitted"),
    ],
)
def test_what_is_wrong_is_told(value: Any, field: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        fleetfile.parse(value)
    assert says in refused.value.message
    assert refused.value.field == field
    assert "fields: " in refused.value.hint
