"""`phalanx plan`: what a job would be on a fleet. With the fleet in a file it asks no API."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from api import planview
from api.cli import calibrate, claims, connection, evaluate, jobfile, show
from api.client import Client
from api.views import EstimateView, PlanView, RankMemory
from service.contracts import errors
from service.contracts.cluster import Fleet, Node
from service.contracts.job import parse_job
from service.core.plan import fleetfile


class Planning(TyperGroup):
    """`phalanx plan FILE` without a word in between; `phalanx plan evaluate` and others beside it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["job", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=Planning, no_args_is_help=True, help="Tell what a job would be, and how well that is known.")
app.command("evaluate")(evaluate.evaluate)
app.command("calibrate")(calibrate.calibrate)
app.command("claims")(claims.claims)

GB = 1e9
WIDTH = 50  # of a bar that is full
LETTERS = {
    "weights": "P", "gradients": "G", "optimizer": "O", "activations": "A", "logits": "L", "overhead": "x",
}  # fmt: skip
LEGEND = "P parameters, G gradients, O optimizer, A activations, L logits, x overhead, . free"
COPIES = 4  # of its part of the state that a node may hold
SMALL = 0.001  # of a step: parts below are left out
LINES = 24  # of the map


@app.command("job")
def plan(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the job, YAML or JSON; - for standard input")],
    fleet: Annotated[Path | None, typer.Option(help="YAML: accelerator, and racks or nodes; default the API's")] = None,
    tokens: Annotated[
        str | None, typer.Option(help="days and GPU-hours to so many, as 1e12; default the job's")
    ] = None,
    probe: Annotated[
        Path | None, typer.Option(help="of `calibrate`: its figures for the devices that it was made on")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, and nothing else")] = False,
    var: jobfile.VarOption = None,
) -> None:
    """Tell which layout a job would get and why, whether it fits, and how fast it would be. Nothing is started."""
    job, count = jobfile.read(file, var), _count(tokens)
    probed = calibrate.read(probe) if probe else None
    if fleet is None and probed is None:
        found = connection.client(context).plan(job, tokens=count)
    else:
        nodes = fleetfile.parse(jobfile.load(fleet)).fleet() if fleet else _seen(connection.client(context))
        found = planview.made(parse_job(job), nodes, count, probed)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        shown(show.console(), found)


def _seen(client: Client) -> Fleet:
    kept = {field.name for field in dataclasses.fields(Node)}
    return Fleet(tuple(Node(**node.model_dump(include=kept)) for node in client.nodes()))


def _count(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        count = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        count = 0.0
    if not 0 < count <= 1e18:
        raise errors.UserError(f"--tokens {text} is no number of tokens", hint="for example 1e12")
    return count


def shown(out: Console, found: PlanView) -> None:
    """For a person to read."""
    told = found.reason if found.chosen else f"{found.described}, as the job asks"
    out.print(f"{found.job}: {told}", style="bold", soft_wrap=True)
    if found.estimate is None:
        out.print("no figures are known of these devices: neither time nor memory is estimated")
    else:
        out.print()
        out.print(_figures(found.estimate, found.slots))
        out.print()
        _memory(out, found.estimate)
        out.print()
        out.print(_parts(found.estimate))
    if found.others:
        out.print()
        out.print(_others(found))
    out.print()
    for line in found.map[:LINES]:
        out.print(line.text, soft_wrap=True)
    if len(found.map) > LINES:
        out.print(f"and {len(found.map) - LINES} more; --json tells all")


def _figures(one: EstimateView, slots: int) -> Table:
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("step", f"{one.step_s:.3g} s, bubble {one.bubble:.1%}")
    facts.add_row("speed", f"{one.tokens_per_s:,.0f} tokens/s, MFU {one.mfu:.1%} of {slots:,} {one.accelerator}")
    facts.add_row("tokens", f"{one.tokens:.3g} in {one.days:,.3g} days, {one.gpu_hours:,.0f} GPU-hours")
    most = max(rank.total for rank in one.memory)
    verdict = "" if one.fits else f"; more than the {one.usable_bytes / GB:.3g} that can be used"
    facts.add_row("memory", f"{most / GB:.3g} of {one.device_bytes / GB:.3g} GB on the fullest device{verdict}")
    each = one.snapshot
    every = f"every {each.every_steps} steps" if each.every_steps > 1 else "every step"
    told = f"{every}, waiting {each.copy_s:.2g} s ({each.share:.2%} of the time), "
    told += (
        f"{each.node_bytes / GB:.3g} GB a node, {each.node_bytes * COPIES / GB:.3g} with a peer's and the one before"
    )
    facts.add_row("snapshots", told if each.every_steps else "none")
    return facts


def _memory(out: Console, one: EstimateView) -> None:
    out.print(f"memory by pipeline rank: {LEGEND}")
    alike: list[tuple[RankMemory, RankMemory]] = []
    for rank in one.memory:
        if alike and _bar(alike[-1][0], one) == _bar(rank, one):
            alike[-1] = (alike[-1][0], rank)
        else:
            alike.append((rank, rank))
    for first, last in alike:
        name = f"{first.rank}" if first is last else f"{first.rank}-{last.rank}"
        out.print(f"{name:>7} |{_bar(first, one)}| {first.total / GB:5.1f} GB", soft_wrap=True)


def _bar(rank: RankMemory, one: EstimateView) -> str:
    """Longer than `WIDTH` where it doesn't fit."""
    bar, held = "", 0.0
    for name, letter in LETTERS.items():
        held += getattr(rank, name)
        bar += letter * (round(held / one.device_bytes * WIDTH) - len(bar))
    return (bar if len(bar) <= 2 * WIDTH else f"{bar[: 2 * WIDTH]}...").ljust(WIDTH, ".")


def _parts(one: EstimateView) -> Table:
    table = _table("PART OF THE STEP", "SECONDS", "SHARE")
    for name, seconds in sorted(one.parts.items(), key=lambda part: -part[1]):
        if seconds >= SMALL * one.step_s:
            table.add_row(name, f"{seconds:.3g}", f"{seconds / one.step_s:.1%}")
    return table


def _others(found: PlanView) -> Table:
    table = _table(
        "NEXT BEST" if found.chosen else "WHAT THE PLANNER WOULD CHOOSE", "STEP", "MFU", "MEMORY", "RATIO", "WHY"
    )
    for other in found.others:
        table.add_row(
            other.described,
            f"{other.step_s:.3g} s",
            f"{other.mfu:.1%}",
            f"{other.memory_bytes / GB:.3g} GB",
            f"{other.ratio:.3f}",
            other.why,
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
