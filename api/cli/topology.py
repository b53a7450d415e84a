"""The fleet as a tree: zones, racks, nodes; and of a job, which rank stands where."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.text import Text
from rich.tree import Tree

from api.cli import connection, show, tables
from api.views import NodeView, RankView

app = typer.Typer()


@app.command()
def topology(
    context: typer.Context,
    uid: Annotated[str | None, typer.Argument(metavar="[JOB]", help="whose ranks are shown too")] = None,
) -> None:
    """Show zones, racks and nodes; with a job, its ranks on them, and how long a step takes each."""
    client = connection.client(context)
    ranks = client.ranks(uid).ranks if uid else ()
    show.console().print(tree(client.nodes(), ranks))


def tree(nodes: Iterable[NodeView], ranks: Iterable[RankView] = ()) -> Tree:
    by_node: dict[str, list[RankView]] = {}
    for rank in ranks:
        by_node.setdefault(rank.node, []).append(rank)
    root, known = Tree("fleet", guide_style="dim"), dict[tuple[str, ...], Tree]()
    for node in sorted(nodes, key=lambda node: (node.zone, node.rack, node.name)):
        branch, path = root, tuple[str, ...]()
        for level, name in (("zone", node.zone), ("rack", node.rack)):
            path = (*path, name)
            if name and path not in known:
                known[path] = branch.add(f"{level} {name}")
            branch = known.get(path, branch)
        leaf = branch.add(_node(node))
        for rank in sorted(by_node.pop(node.name, ()), key=lambda rank: rank.slot):
            leaf.add(_rank(rank))
    for name, lost in by_node.items():
        leaf = root.add(Text(f"{name}: not in the fleet any more", style="red"))
        for rank in lost:
            leaf.add(_rank(rank))
    return root


def _node(node: NodeView) -> Text:
    kind = node.accelerator or node.device
    text = Text.assemble((node.name, "bold"), f"  {node.slots} {kind} slots")
    return text.append(f"  {node.barred}", style="yellow") if node.barred else text


def _rank(rank: RankView) -> Text:
    where = f"slot {rank.slot}: rank {rank.rank} (pp {rank.pp}, dp {rank.dp}, tp {rank.tp})"
    return Text(f"{where}  {tables.duration(rank.step_s)} a step" if rank.step_s is not None else where)
