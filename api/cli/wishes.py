"""Commands that change a job that is there."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from api.cli import connection, values
from api.cli.jobs import Uid

app = typer.Typer()


@app.command()
def cancel(
    context: typer.Context,
    uid: Uid,
    graceful: Annotated[bool, typer.Option("--graceful", help="after the step under way, with a checkpoint")] = False,
) -> None:
    """End a job and free its slots."""
    job = connection.client(context).cancel(uid, graceful)
    typer.echo(f"{job.uid} is {job.phase}; cancellation is asked for")


@app.command()
def delete(
    context: typer.Context,
    uid: Uid,
    data: Annotated[bool, typer.Option("--data", help="its checkpoints and logs in storage too")] = False,
) -> None:
    """Forget a job that has ended."""
    connection.client(context).remove(uid, data)
    typer.echo(f"{uid} is forgotten{', and its folder in storage removed' if data else ''}")


@app.command()
def suspend(context: typer.Context, uid: Uid) -> None:
    """Have a job hold nothing until it is resumed; the step under way becomes a checkpoint."""
    job = connection.client(context).suspend(uid)
    typer.echo(f"{job.uid} is {job.phase}; it is to be suspended")


@app.command()
def resume(context: typer.Context, uid: Uid) -> None:
    """Have a job that was suspended go on."""
    job = connection.client(context).resume(uid)
    typer.echo(f"{job.uid} is {job.phase}; it is to go on")


@app.command()
def restart(
    context: typer.Context,
    uid: Uid,
    step: Annotated[int | None, typer.Option(min=0, help="go back to the checkpoint of this step")] = None,
    skip_samples: Annotated[int, typer.Option(min=0, help="leave out so many samples after it")] = 0,
) -> None:
    """End a job's processes after the step under way and start them again; nothing is done again, unless it is to go
    back to a checkpoint."""
    job = connection.client(context).restart(uid, step, skip_samples)
    back = "" if step is None else f" at step {step}"
    typer.echo(f"{job.uid} is {job.phase}; it is to be started again{back}")


@app.command()
def rescale(
    context: typer.Context,
    uid: Uid,
    slots: Annotated[int, typer.Option(help="ranks from now on", min=1)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="tell what it would come to, and change nothing")] = False,
) -> None:
    """Give a job that is under way another size: it pauses after a step and goes on."""
    told = connection.client(context).rescale(uid, slots, dry_run=dry_run)
    typer.echo(told.reason if told.possible else f"not now: {told.reason}")
    if told.asked:
        typer.echo(f"{uid} is asked to run on {slots} slots")


@app.command()
def change(
    context: typer.Context,
    uid: Uid,
    fields: Annotated[list[str], typer.Argument(metavar="FIELD=VALUE", help="priority=10, checkpoint.keep=5, ...")],
) -> None:
    """Change priority, queue, labels, elastic bounds, checkpoint policy or budgets of a job, also while it runs."""
    job = connection.client(context).change(uid, _patch(fields))
    typer.echo(f"{job.uid}: generation {job.generation} of its spec")


def _patch(fields: list[str]) -> dict[str, Any]:
    """A merge patch of dotted names; a value is YAML, so that `null` removes a field."""
    made: dict[str, Any] = {}
    for field in fields:
        name, value = values.assigned(field, "FIELD=VALUE, such as priority=10")
        *parents, last = name.split(".")
        inner = made
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return made
