"""`phalanx sweep`: the same job with several values of some fields, submitted, compared and cancelled together."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from api import sweep
from api.cli import connection, jobfile, show, tables, values, variables
from service.contracts import errors
from service.contracts.status import JobView

app = typer.Typer(no_args_is_help=True, help="Run one job with several values of its fields, and compare them.")

FIGURES = {"step", "steps", "loss", "eval_loss", "eval_step", "eval_best", "eval_best_step"}
FORM = "--over PATH=VALUE,VALUE, such as --over train.learning_rate=1e-4,3e-4"
Id = Annotated[str, typer.Argument(metavar="ID", help="of the sweep")]
JsonOption = Annotated[bool, typer.Option("--json", help="as JSON, and nothing else")]


@app.command()
def submit(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the job, YAML or JSON; - for standard input")],
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH=VALUE,...", help="values of a field; of several fields each with each"),
    ] = None,
    var: jobfile.VarOption = None,
    id_: Annotated[
        str | None, typer.Option("--id", help="of the sweep: the same one never submits a job twice")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check every job, and submit none")] = False,
    project: Annotated[str | None, typer.Option(help="default: the token's")] = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a job for each combination of values, of --over and of the file's `sweep:`, a map of paths to lists."""
    members = _members(jobfile.load(file), over or (), variables.given(var or ()))
    id_ = secrets.token_hex(4) if id_ is None else id_
    submitting = sweep.submit(connection.client(context), id_, members, project)
    if dry_run:
        typer.echo(f"{len(members)} jobs can be submitted")
        return
    found = []
    for job in submitting:
        found.append(job)
        if not as_json:
            typer.echo(f"{job.uid}  {sweep.words(sweep.values(job))}")
    typer.echo(_json(id_, found) if as_json else f"sweep {id_}: {len(found)} jobs; 'phalanx sweep show {id_}'")


@app.command("show")
def shown(context: typer.Context, id_: Id, as_json: JsonOption = False) -> None:
    """Compare the jobs of a sweep, best first: by the best loss on other text if there is any, else by the last."""
    found = sweep.ranked(sweep.jobs(connection.client(context), id_))
    if as_json:
        typer.echo(_json(id_, found))
    else:
        show.console().print(tables.members(found))


@app.command()
def cancel(context: typer.Context, id_: Id, as_json: JsonOption = False) -> None:
    """End those jobs of a sweep that are not over."""
    client = connection.client(context)
    found = sweep.jobs(client, id_)
    asked = sweep.cancel(client, found)
    typer.echo(
        _json(id_, asked) if as_json else f"cancellation is asked for of {len(asked)} of {len(found)} jobs of {id_}"
    )


def _members(document: dict[str, Any], over: Sequence[str], given: Mapping[str, Any]) -> list[sweep.Member]:
    base, grid = _split(document)
    grid |= dict(values.listed(one, FORM) for one in over)
    if twice := [name for name in given if f"{variables.SECTION}.{name}" in grid]:
        raise errors.UserError(f"variable {twice[0]} is swept over, and given by --var", hint="leave out one of them")
    return [sweep.Member(each, _spec(base, each, given)) for each in sweep.combinations(grid)]


def _split(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The job, and what its file sweeps over."""
    base = dict(document)
    grid = base.pop(jobfile.SWEEP, None) or {}
    if not isinstance(grid, dict) or not all(isinstance(one, list) for one in grid.values()):
        hint = "sweep: {train.learning_rate: [1e-4, 3e-4]}"
        raise errors.UserError("sweep is a mapping of paths to lists of values", hint=hint, field=jobfile.SWEEP)
    return base, {str(path): values.numbers(one) for path, one in grid.items()}


def _spec(base: Mapping[str, Any], each: sweep.Values, given: Mapping[str, Any]) -> dict[str, Any]:
    return variables.fill(sweep.changed(base, each), given)


def _json(id_: str, found: Sequence[JobView]) -> str:
    return json.dumps({"sweep": id_, "jobs": [_told(job) for job in found]}, indent=2)


def _told(job: JobView) -> dict[str, Any]:
    progress = job.status.progress.model_dump(include=FIGURES)
    return {"uid": job.uid, "values": sweep.values(job), "phase": job.phase.value, **progress}
