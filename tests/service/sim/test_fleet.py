from __future__ import annotations

import pytest

from service.contracts.errors import UserError
from service.sim import fleet
from service.sim.fleet import Machines


def test_nodes_fill_racks_in_order() -> None:
    made = fleet.parse({"nodes": 11, "slots": 8, "rack": 4}).made()
    assert [node.name for node in made][::5] == ["n00", "n05", "n10"]
    assert [node.rack for node in made] == ["r0"] * 4 + ["r1"] * 4 + ["r2"] * 3
    assert {(node.slots, node.device, node.accelerator) for node in made} == {(8, "gpu", "H100")}
    linked = fleet.parse({"nodes": 5, "slots": 4, "nvlink": 2, "gpu": "B200"}).made()
    assert [node.nvlink for node in linked] == ["d0", "d0", "d1", "d1", "d2"]
    assert len({node.rack_key for node in fleet.parse({"nodes": 3, "slots": 1}).made()}) == 3


@pytest.mark.parametrize(
    ("value", "field"),
    [({"nodes": 0, "slots": 8}, "nodes"), ({"slots": 8}, "nodes"), ({"nodes": 1, "slots": 1, "colour": 1}, "colour")],
)
def test_a_wrong_fleet_names_its_field(value: object, field: str) -> None:
    with pytest.raises(UserError) as caught:
        fleet.parse(value)
    assert caught.value.field == field


def test_a_node_is_missed_when_it_is_noticed_and_comes_back_as_another() -> None:
    machines = Machines(fleet.FleetSpec(nodes=3, slots=2).made())
    machines.lose(1, at=10)
    assert (machines.alive, machines.up(1), machines.is_up(["n0"]), machines.is_up(["n0", "n1"])) == (
        4,
        False,
        True,
        False,
    )
    assert not machines.notice(9)
    assert [node.id for node in machines.seen().nodes] == ["n0", "n1", "n2"]
    assert machines.notice(10)
    assert not machines.notice(11), "it is no news"
    assert [node.id for node in machines.seen().nodes] == ["n0", "n2"]
    machines.restore(1)
    assert [(node.id, node.name) for node in machines.seen().nodes] == [("n0", "n0"), ("n1.1", "n1"), ("n2", "n2")]
    assert (machines.alive, machines.index("n1"), machines.index("n1.1")) == (6, 1, 1)
    assert not machines.is_up(["n1"]), "what stood on it is gone"


def test_a_node_that_is_back_before_anyone_noticed_was_not_missed() -> None:
    machines = Machines(fleet.FleetSpec(nodes=1, slots=1).made())
    machines.lose(0, at=1)
    machines.restore(0)
    assert not machines.notice(100)
