"""`phalanx topology`: the tree of the fleet, and of a job on it."""

from __future__ import annotations

from rich.console import Console

from api.cli import topology
from api.views import NodeView, RankView
from tests.api.commands import Run
from tests.api.world import World


def node(name: str, rack: str = "", zone: str = "", barred: str | None = None) -> NodeView:
    return NodeView(
        id=name, name=name, slots=2, rack=rack, zone=zone, device="cpu", address="127.0.0.1", seen_at=1.0, barred=barred
    )


def rank(number: int, at: str, step_s: float | None = None) -> RankView:
    return RankView(rank=number, node=at, slot=number % 2, rack="", zone="", pp=0, dp=number, tp=0, step_s=step_s)


def drawn(*given: object) -> str:
    plain = Console(width=100)
    with plain.capture() as capture:
        plain.print(topology.tree(*given))  # type: ignore[arg-type]
    return capture.get()


def test_zones_racks_nodes_and_ranks() -> None:
    nodes = [node("n2", "r1", "z"), node("n0", "r0", "z"), node("n1", "r0", "z", "it cools down for 20 s")]
    assert drawn(nodes, [rank(1, "n0", 0.25), rank(0, "n0"), rank(2, "n9")]).splitlines() == [
        "fleet",
        "├── zone z",
        "│   ├── rack r0",
        "│   │   ├── n0  2 cpu slots",
        "│   │   │   ├── slot 0: rank 0 (pp 0, dp 0, tp 0)",
        "│   │   │   └── slot 1: rank 1 (pp 0, dp 1, tp 0)  0.2s a step",
        "│   │   └── n1  2 cpu slots  it cools down for 20 s",
        "│   └── rack r1",
        "│       └── n2  2 cpu slots",
        "└── n9: not in the fleet any more",
        "    └── slot 0: rank 2 (pp 0, dp 2, tp 0)",
    ]


def test_nodes_without_labels_hang_on_the_fleet() -> None:
    assert drawn([node("n0"), node("n1", "r0")]).splitlines() == [
        "fleet",
        "├── n0  2 cpu slots",
        "└── rack r0",
        "    └── n1  2 cpu slots",
    ]


def test_the_command(run: Run, world: World) -> None:
    with world.fleet(2, 2):
        told = run("topology")
    assert told.exit_code == 0, told.output
    assert "n1  2 cpu slots" in told.stdout
    uid = world.submit().uid
    assert "fleet" in run("topology", uid).stdout
