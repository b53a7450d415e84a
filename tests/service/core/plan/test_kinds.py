from __future__ import annotations

import pytest

from service.contracts.cluster import Fleet, Node
from service.contracts.job import PlacementPolicy
from service.core.plan import kinds


def nodes(*sizes: int, accelerator: str = "H100", device: str = "gpu", rack: int = 0, nvlink: int = 0) -> Fleet:
    """With so many slots each; `rack` and `nvlink` nodes share one."""
    return Fleet(
        tuple(
            Node(
                f"{accelerator}{i}", f"n{i}", slots, device=device, accelerator=accelerator,
                rack=f"r{i // rack}" if rack else "", nvlink=f"d{i // nvlink}" if nvlink else "",
            )
            for i, slots in enumerate(sizes)
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fleet", "policy", "node", "domain", "rack"),
    [
        (nodes(8, 8), {}, 8, 8, 8),
        (nodes(8, 8, 8, 8, rack=2), {}, 8, 8, 16),
        (nodes(4, 4, 4, 4, rack=4, nvlink=4), {}, 4, 16, 16),
        (nodes(4, 4, 4, 4, rack=4, nvlink=4), {"tp": "node"}, 4, 4, 16),
        (nodes(8, 4, 4), {}, 8, 8, 8),  # as many slots: the larger
        (nodes(8, 4, 4, 4), {}, 4, 4, 4),
        (nodes(8, 8, 8, rack=2), {}, 8, 8, 16),
        (nodes(1, 1), {}, 1, 1, 1),
        (nodes(8, 0, 0), {}, 8, 8, 8),
    ],
)
def test_a_kind_as_a_cluster(fleet: Fleet, policy: dict[str, str], node: int, domain: int, rack: int) -> None:
    (kind,) = kinds.of(fleet, "gpu")
    found = kind.cluster(16, PlacementPolicy.model_validate(policy))
    assert (found.gpus, found.gpus_per_node, found.domain, found.rack) == (16, node, domain, rack)
    assert found.gpu.name == "H100-80GB"


def test_kinds_are_told_apart_by_the_names_of_the_nodes() -> None:
    fleet = Fleet((*nodes(8, 8).nodes, *nodes(8, accelerator="TPU").nodes, *nodes(4, accelerator="A100-80G").nodes))
    found = kinds.of(fleet, "gpu")
    assert [(kind.name, kind.gpu.name, kind.fleet.slots) for kind in found] == [
        ("H100", "H100-80GB", 16),
        ("A100-80G", "A100-80GB", 4),
    ]
    assert found[0].free({("H1000", 0), ("H1001", 7), ("A100-80G0", 0)}) == 14


@pytest.mark.parametrize(
    ("fleet", "device"),
    [
        (nodes(8), "cpu"),
        (nodes(8, device="cpu"), "gpu"),
        (nodes(8, accelerator="cpu"), "gpu"),
        (nodes(8, accelerator=""), "gpu"),
        (nodes(0), "gpu"),
        (Fleet(), "gpu"),
    ],
)
def test_there_may_be_none(fleet: Fleet, device: str) -> None:
    assert kinds.of(fleet, device) == ()
