"""Commands that run Phalanx itself on this machine: the fleet is a process of its own, this one loads no Ray."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from api.cli import connection, show
from api.cli import demo as demonstration
from service import roster

app = typer.Typer()

Port = Annotated[int, typer.Option(min=0, max=65535, help="of the API; 0: a free one")]


@app.command()
def up(
    context: typer.Context,
    racks: Annotated[int, typer.Option(min=1)] = 2,
    nodes: Annotated[int, typer.Option(min=1, help="in a rack")] = 2,
    slots: Annotated[int, typer.Option(min=1, help="CPU slots of a node")] = 2,
    api_port: Port = 7070,
) -> None:
    """Start a local fleet of simulated nodes, the controller and the API, and stay until Ctrl-C or `phalanx down`."""
    home = connection.home(context)
    size = ["--racks", racks, "--nodes", nodes, "--slots", slots, "--api-port", api_port]
    command = [sys.executable, "-m", "service.local", "--home", home, *size]
    typer.echo(f"starting {racks * nodes} nodes of {slots} slots in {racks} racks, in {home} ...")
    os.execv(sys.executable, [str(word) for word in command])


@app.command()
def down(context: typer.Context) -> None:
    """End the local fleet, the controller and the API. Jobs go on at their last checkpoint with the next `up`."""
    home = connection.home(context)
    count = roster.down(home)
    typer.echo(f"ended {count} processes" if count else f"nothing runs in {home}")


@app.command()
def demo(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="the last line of the output is one JSON object")] = False,
    steps: Annotated[int, typer.Option(min=4)] = 60,
    kill: Annotated[bool, typer.Option(help="kill one rank half way")] = True,
) -> None:
    """Train in 3D on this machine, lose a rank half way, recover, finish: the main job, from nothing to nothing."""
    home = demonstration.fresh_home(Path(connection.home(context)))
    summary = demonstration.run(home, steps, kill, show.console(stderr=as_json))
    if as_json:
        typer.echo(summary.as_json())
    if not summary.succeeded:
        raise typer.Exit(1)
