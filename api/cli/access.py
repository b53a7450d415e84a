"""Commands of an operator: queues, projects, tokens, webhooks, and who changed what."""

from __future__ import annotations

import itertools
import time
from typing import Annotated, get_args

import typer

from api.cli import connection, show, tables
from service.contracts import errors
from service.store.records import Scope

queues = typer.Typer(no_args_is_help=True, help="Queues, and which of them comes first.")
projects = typer.Typer(no_args_is_help=True, help="Projects, and what their jobs may hold.")
hooks = typer.Typer(no_args_is_help=True, help="Who is told of events.")
tokens = typer.Typer(no_args_is_help=True, help="Who may do what.")
app = typer.Typer()

Name = Annotated[str, typer.Argument(help="of the project")]
Slots = Annotated[int | None, typer.Option(min=1, help="that its jobs may hold together; without: no bound")]
QueueName = Annotated[str, typer.Argument(help="of the queue")]
Priority = Annotated[int, typer.Option(help="jobs of a queue of a higher one come first")]
DAY_S = 86_400.0


@queues.command("list")
def list_queues(context: typer.Context) -> None:
    """List queues, what comes first at the top."""
    show.console().print(tables.queues(connection.client(context).queues()))


@queues.command("create")
def create_queue(context: typer.Context, name: QueueName, priority: Priority = 0) -> None:
    """Make a queue."""
    typer.echo(f"made queue {connection.client(context).make_queue(name, priority).name}")


@queues.command("priority")
def set_priority(context: typer.Context, name: QueueName, priority: Priority) -> None:
    """Change the priority of a queue, for all its jobs."""
    typer.echo(f"queue {name} has priority {connection.client(context).set_priority(name, priority).priority}")


@projects.command("list")
def list_projects(context: typer.Context) -> None:
    """List projects."""
    show.console().print(tables.projects(connection.client(context).projects()))


@projects.command("create")
def create_project(context: typer.Context, name: Name, slots: Slots = None) -> None:
    """Make a project."""
    typer.echo(f"made project {connection.client(context).make_project(name, slots).name}")


@projects.command("quota")
def set_quota(context: typer.Context, name: Name, slots: Slots = None) -> None:
    """Change what its jobs may hold together; what runs goes on."""
    bound = connection.client(context).set_quota(name, slots).slots
    typer.echo(f"the jobs of {name} may hold {'any number of' if bound is None else bound} slots")


@tokens.command("create")
def create_token(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="whose it is, for people")],
    scope: Annotated[str, typer.Option(help="read, submit or admin")] = "submit",
    project: Annotated[str | None, typer.Option(help="the only one it is for; without: all of them")] = None,
    days: Annotated[float | None, typer.Option(min=0, help="until it opens nothing any more")] = None,
) -> None:
    """Make a token and print it: it is shown this once."""
    if scope not in get_args(Scope):
        raise errors.UserError(f"there is no scope {scope!r}", hint="read, submit or admin", field="--scope")
    lasts_s = None if days is None else days * DAY_S
    typer.echo(connection.client(context).make_token(name, scope, project, lasts_s).token)  # type: ignore[arg-type]


@tokens.command("list")
def list_tokens(context: typer.Context, project: Annotated[str | None, typer.Option()] = None) -> None:
    """List tokens, revoked and expired ones too."""
    show.console().print(tables.tokens(connection.client(context).tokens(project), time.time()))


@tokens.command("revoke")
def revoke_token(context: typer.Context, id_: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Have a token open nothing any more."""
    connection.client(context).revoke_token(id_)
    typer.echo(f"token {id_} opens nothing any more")


@hooks.command("create")
def create_hook(
    context: typer.Context,
    url: Annotated[str, typer.Argument()],
    secret: Annotated[str, typer.Option(help="key of its signatures, for the controller: env:NAME or file:PATH")],
    type_: Annotated[list[str] | None, typer.Option("--type", help="of events; without: phases and incidents")] = None,
    project: Annotated[str | None, typer.Option(help="without: all of them")] = None,
) -> None:
    """Have a URL told of events from now on."""
    typer.echo(f"made webhook {connection.client(context).make_hook(url, secret, type_, project).id}")


@hooks.command("list")
def list_hooks(context: typer.Context) -> None:
    """List webhooks, with how far each was told and why no further."""
    show.console().print(tables.hooks(connection.client(context).hooks()))


@hooks.command("delete")
def remove_hook(context: typer.Context, id_: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Tell it nothing more."""
    connection.client(context).remove_hook(id_)
    typer.echo(f"webhook {id_} is told nothing more")


@app.command()
def usage(
    context: typer.Context,
    days: Annotated[float | None, typer.Option(min=0, help="only of jobs submitted in the last so many")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="of a slot-hour")] = None,
) -> None:
    """Show what jobs have used, by project and queue: slot-hours, tokens, goodput."""
    since = 0.0 if days is None else time.time() - days * DAY_S
    show.console().print(tables.usage(connection.client(context).usage(since, price=price)))


@app.command()
def audit(
    context: typer.Context,
    project: Annotated[str | None, typer.Option(help="only of this one")] = None,
    limit: Annotated[int, typer.Option(min=1, help="entries shown")] = 1000,
) -> None:
    """Print who changed what, or tried to, oldest first."""
    for entry in itertools.islice(connection.client(context).audit(project), limit):
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at))
        typer.echo(f"{at}  {entry.status}  {entry.who}  {entry.action} {entry.target}")
