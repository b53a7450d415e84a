"""`phalanx track`: a job's figures and incidents into TensorBoard, MLflow or W&B, over the public API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from api import sweep
from api.cli import connection
from api.client import Client
from api.tracking import following
from api.tracking.following import Following
from api.tracking.mlflow import MLflow
from api.tracking.tensorboard import TensorBoard
from api.tracking.tracker import Tracker
from api.tracking.wandb import WandB
from service.contracts import errors

app = typer.Typer()


@app.command()
def track(
    context: typer.Context,
    uid: Annotated[str | None, typer.Argument(metavar="JOB", help="uid of the job")] = None,
    sweep_: Annotated[str | None, typer.Option("--sweep", metavar="ID", help="all jobs of it instead of one")] = None,
    tensorboard: Annotated[Path | None, typer.Option(metavar="DIR", help="folder of its runs")] = None,
    mlflow: Annotated[str | None, typer.Option(metavar="URI", help="of the tracking server, or sqlite:///...")] = None,
    experiment: Annotated[str, typer.Option(help="of MLflow")] = "phalanx",
    wandb: Annotated[str | None, typer.Option(metavar="PROJECT", help="of W&B")] = None,
    once: Annotated[bool, typer.Option("--once", help="write what there is, and end")] = False,
) -> None:
    """Follow a job into trackers until it is over: one run over all its attempts, which a second call goes on with."""
    made: list[Callable[[], Tracker]] = []
    if tensorboard is not None:
        made.append(lambda: TensorBoard(tensorboard))
    if mlflow is not None:
        made.append(lambda: MLflow(mlflow, experiment))
    if wandb is not None:
        made.append(lambda: WandB(wandb))
    if not made:
        raise errors.UserError("it is not said where to", hint="--tensorboard DIR, --mlflow URI or --wandb PROJECT")
    client = connection.client(context)
    found = [Following(client, one, make()) for one in _uids(client, uid, sweep_) for make in made]
    try:
        following.run(found, once)
    except KeyboardInterrupt:
        typer.echo("\nthe same command goes on from here", err=True)
        raise typer.Exit(130) from None
    for one in found:
        typer.echo(f"{one.job.uid} is {one.job.phase}: {one.steps} steps written, up to step {one.cursor.step}")


def _uids(client: Client, uid: str | None, sweep_: str | None) -> Iterator[str]:
    if (uid is None) == (sweep_ is None):
        raise errors.UserError("a job or a sweep is named, and one of them", hint="phalanx track JOB, or --sweep ID")
    if uid is not None:
        return iter([uid])
    return (job.uid for job in sweep.jobs(client, sweep_ or ""))
