"""`phalanx simulate`: a job's goodput on a fleet that fails. Asks no API: it runs here, in virtual time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from api.cli import jobfile, show
from api.cli.tables import duration
from service.contracts import errors
from service.contracts.job import parse_job
from service.sim import baseline, clock, fleet, phases, report, scenario, simulate, timeline
from service.sim.simulate import Result

app = typer.Typer()

ROWS = (
    # figure, as it is called
    ("goodput", "goodput, of the job's time"),
    ("goodput_fleet", "goodput, of the whole fleet"),
    ("goodput_available", "goodput, of the slots alive"),
)


@app.command("simulate")
def simulate_(
    job: Annotated[Path, typer.Option(help="the job, YAML or JSON")],
    fleet_file: Annotated[Path, typer.Option("--fleet", help="YAML: nodes, slots, rack, nvlink, device, gpu")],
    failures: Annotated[
        str, typer.Option("--faults", help="a trace's file; rates, which are Llama 3's; or rates:NAME, as rates:rsc-1")
    ] = scenario.RATES,
    days: Annotated[float, typer.Option(min=0.001, max=36_500)] = 30.0,
    seed: Annotated[int, typer.Option(help="of what is drawn")] = 0,
    elastic: Annotated[
        bool, typer.Option(help="with fewer replicas while nodes are missing, instead of waiting")
    ] = False,
    min_slots: Annotated[int | None, typer.Option(min=1, help="of an elastic job; default half")] = None,
    standbys: Annotated[bool, typer.Option(help="processes stand ready behind the ranks")] = False,
    incidents: Annotated[
        Path | None, typer.Option(help="a job that recovered, as `phalanx get -o json` tells it: take its durations")
    ] = None,
    phase: Annotated[
        list[str] | None, typer.Option(metavar="NAME=SECONDS", help=f"of {', '.join(phases.names())}")
    ] = None,
    step_s: Annotated[float | None, typer.Option(min=1e-4, help="seconds of a step; default an estimate")] = None,
    snapshot_s: Annotated[float | None, typer.Option(min=0, help="seconds that a snapshot blocks the ranks")] = None,
    with_baseline: Annotated[
        bool, typer.Option("--baseline", help="also with checkpoints of 30 minutes and restarts of 10")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, and nothing else")] = False,
    csv: Annotated[Path | None, typer.Option(help="file for a row a span")] = None,
    svg: Annotated[Path | None, typer.Option(help="file for a picture")] = None,
    var: jobfile.VarOption = None,
) -> None:
    """Predict goodput under faults, and where the time goes: the service's own decisions in virtual time."""
    durations = phases.Phases().with_standbys() if standbys else phases.Phases()
    if incidents is not None:
        durations = phases.measured(jobfile.load(incidents), durations)
    asked = scenario.Asked(
        job=parse_job(jobfile.read(job, var)),
        fleet=fleet.parse(jobfile.load(fleet_file)),
        faults=failures,
        days=days,
        seed=seed,
        phases=phases.changed(durations, phase or ()),
        elastic=elastic,
        min_slots=min_slots,
        step_s=step_s,
        snapshot_s=snapshot_s,
    )
    ours = scenario.made(asked)
    results = {"phalanx": simulate.run(ours)}
    if with_baseline:
        results["baseline"] = simulate.run(baseline.of(ours))
    _written(csv, report.as_csv(results["phalanx"]))
    _written(svg, timeline.drawn(results["phalanx"], f"{asked.job.name}: {days:g} days", _caption(results["phalanx"])))
    told = {name: report.figures(result) for name, result in results.items()}
    if as_json:
        setting = {
            "failures": len(ours.failures),
            "layout": str(ours.pace.full),
            "step_s": clock.seconds(ours.pace.step_us),
            "snapshot": {"every_steps": ours.snapshot.every, "s": clock.seconds(ours.snapshot.us)},
            "phases": dataclasses.asdict(ours.phases),
            "seed": seed,
        }
        typer.echo(json.dumps({"setting": setting, **told}))
        return
    show.console().print(
        f"{ours.pace.full}, {clock.seconds(ours.pace.step_us):.3g} s a step, {len(ours.failures)} failures"
    )
    show.console().print(_table(told))


def _table(told: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("", *told):
        table.add_column(column, no_wrap=True)
    for key, name in ROWS:
        table.add_row(name, *(f"{one[key]:.2%}" for one in told.values()))
    for loss in next(iter(told.values()))["loss_available"]:
        name = f"  lost to {loss.replace('_', ' ')}"
        table.add_row(name, *(f"{one['loss_available'][loss]:.2%}" for one in told.values()))
    table.add_row("slots down", *(f"{one['shares']['down']:.2%}" for one in told.values()))
    table.add_row("slots spare", *(f"{one['shares']['spare']:.2%}" for one in told.values()))
    table.add_row("attempts", *(str(one["attempts"]) for one in told.values()))
    table.add_row("recovered in, median", *(duration(one["recover_s"]) for one in told.values()))
    table.add_row("steps", *(f"{one['steps']:,}" for one in told.values()))
    table.add_row("phase", *(f"{one['phase']} after {duration(one['elapsed_s'])}" for one in told.values()))
    return table


def _caption(result: Result) -> list[str]:
    told = report.figures(result)
    goodputs = ", ".join(f"{name} {told[key]:.2%}" for key, name in ROWS)
    losses = ", ".join(f"{name.replace('_', ' ')} {share:.2%}" for name, share in told["loss_available"].items())
    return [goodputs, f"lost of the slots alive: {losses}; {told['attempts']} attempts"]


def _written(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise errors.UserError(f"{path} can't be written: {error.strerror}") from None
