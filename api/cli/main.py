"""`phalanx`: the command line. Puts the commands together; an error becomes a message and an exit code.

Exit codes: 0 done; 1 the job that was followed did not succeed; 2 what was asked for can't be done as asked;
3 the API or the cluster failed, and trying again may work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from api.cli import (
    access,
    checkpoints,
    data,
    doctor,
    jobs,
    local,
    plan,
    replay,
    show,
    simulate,
    sweeps,
    topology,
    track,
    wishes,
)
from api.cli.connection import Connection
from service.contracts import errors


class Phalanx(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except errors.PhalanxError as error:
            show.problem(error)
            raise typer.Exit(2 if isinstance(error, errors.UserError) else 3) from None


app = typer.Typer(
    cls=Phalanx,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Train language models on clusters that break, and keep them training.",
)


@app.callback()
def connect(
    context: typer.Context,
    home: Annotated[
        Path, typer.Option(envvar="PHALANX_HOME", help="folder where the API leaves its address and token")
    ] = Path("~/.phalanx"),
    url: Annotated[str | None, typer.Option(envvar="PHALANX_API_URL", help="of the API")] = None,
    token: Annotated[str | None, typer.Option(envvar="PHALANX_TOKEN", show_default=False)] = None,
) -> None:
    context.obj = Connection(home.expanduser(), url, token)


app.add_typer(jobs.app)
app.add_typer(topology.app)
app.add_typer(track.app)
app.add_typer(wishes.app)
app.add_typer(sweeps.app, name="sweep")
app.add_typer(checkpoints.app, name="checkpoint")
app.add_typer(data.app, name="data")
app.add_typer(replay.app)
app.add_typer(access.projects, name="project")
app.add_typer(access.queues, name="queue")
app.add_typer(access.tokens, name="token")
app.add_typer(access.hooks, name="hook")
app.add_typer(access.app)
app.add_typer(local.app)
app.add_typer(doctor.app)
app.add_typer(plan.app, name="plan")
app.add_typer(simulate.app)
