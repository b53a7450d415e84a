"""Commands about jobs and the nodes they run on. Each asks the API and shows the answer."""

from __future__ import annotations

import collections
import contextlib
import enum
import itertools
import json
import time
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.live import Live
from rich.table import Table

from api.cli import connection, jobfile, show, tables
from api.client import Client
from service.contracts.job import Phase
from service.contracts.status import JobView

app = typer.Typer()

Uid = Annotated[str, typer.Argument(metavar="JOB", help="uid of the job")]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="go on until the job is over")]


class Output(enum.StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


OutputOption = Annotated[Output, typer.Option("--output", "-o")]


@app.command()
def submit(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the job, YAML or JSON; - for standard input")],
    follow: FollowOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the job as JSON, and nothing else")] = False,
    key: Annotated[str | None, typer.Option(help="idempotency key: the same one never submits twice")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="tell what it would come to, and keep nothing")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="until it is over, without a word")] = False,
    project: Annotated[str | None, typer.Option(help="default: the token's")] = None,
    var: jobfile.VarOption = None,
) -> None:
    """Submit a job. With --follow or --wait the exit code is the job's."""
    client, spec = connection.client(context), jobfile.read(file, var)
    if dry_run:
        told = client.dry_run(spec, project)
        typer.echo(told.model_dump_json(indent=2) if as_json else show.trial(told))
        return
    job = client.submit(spec, key, project)
    if not as_json:
        typer.echo(f"submitted {job.uid}")
    if follow or wait:
        job = _followed(client, job.uid, as_json or not follow)
    if as_json:
        typer.echo(job.model_dump_json(indent=2))
    if (follow or wait) and job.phase is not Phase.SUCCEEDED:
        raise typer.Exit(1)


@app.command("list")
def listing(
    context: typer.Context,
    phase: Annotated[list[Phase] | None, typer.Option(help="only jobs in this phase, or one of these")] = None,
    name: Annotated[str, typer.Option(help="only of this name; run-*: that begin so")] = "",
    label: Annotated[list[str] | None, typer.Option("--label", "-l", metavar="KEY[=VALUE]")] = None,
    oldest: Annotated[bool, typer.Option("--oldest", help="first")] = False,
    limit: Annotated[int, typer.Option(min=1, help="jobs shown")] = 50,
    output: OutputOption = Output.TABLE,
) -> None:
    """List jobs, newest first."""
    labels = {key: value if sign else None for key, sign, value in (one.partition("=") for one in label or ())}
    client = connection.client(context)
    found = client.list(phase or (), min(limit, 200), name=name, labels=labels, oldest=oldest)
    shown = list(itertools.islice(found, limit))
    match output:
        case Output.JSON:
            typer.echo(json.dumps([job.model_dump(mode="json") for job in shown], indent=2))
        case Output.YAML:
            typer.echo(yaml.safe_dump([job.model_dump(mode="json") for job in shown], sort_keys=False), nl=False)
        case Output.TABLE:
            show.console().print(tables.jobs(shown, time.time()))


@app.command()
def get(
    context: typer.Context,
    uid: Uid,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one job: phase and why, progress, layout, incidents."""
    job = connection.client(context).get(uid)
    match output:
        case Output.JSON:
            typer.echo(job.model_dump_json(indent=2))
        case Output.YAML:
            typer.echo(yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False), nl=False)
        case Output.TABLE:
            show.job(show.console(), job)


@app.command()
def describe(context: typer.Context, uid: Uid, events: Annotated[int, typer.Option(min=0, help="shown")] = 20) -> None:
    """Show all of one job: conditions, where its time went, incidents, its last events."""
    client, out, now = connection.client(context), show.console(), time.time()
    job = client.get(uid)
    show.job(out, job)
    out.print()
    out.print(tables.conditions(job.status.conditions, now))
    out.print()
    out.print(tables.seconds(client.goodput(uid)))
    out.print()
    for event in collections.deque(client.events(uid), events):
        out.print(show.event_line(event), soft_wrap=True)


@app.command()
def top(
    context: typer.Context,
    every: Annotated[float, typer.Option(min=0.2, help="seconds between looks; once where nobody looks on")] = 2.0,
) -> None:
    """Watch what is at work and what waits, until Ctrl-C."""
    client, out = connection.client(context), show.console()
    going = [phase for phase in Phase if not phase.terminal]

    def look() -> Table:
        return tables.busy(itertools.islice(client.list(going, 100), 100))

    if not out.is_terminal:
        out.print(look())
        return
    with contextlib.suppress(KeyboardInterrupt), Live(look(), console=out, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(look(), refresh=True)


@app.command()
def logs(
    context: typer.Context,
    uid: Uid,
    follow: FollowOption = False,
    rank: Annotated[int | None, typer.Option(min=0, help="only of this rank")] = None,
    attempt: Annotated[int | None, typer.Option(min=0, help="only of this attempt")] = None,
) -> None:
    """Print what the ranks wrote, each line behind its attempt, rank and node."""
    for line in connection.client(context).logs(uid, follow=follow, rank=rank, attempt=attempt):
        typer.echo(show.log_line(line))


@app.command()
def events(context: typer.Context, uid: Uid, follow: FollowOption = False) -> None:
    """Print what happened to a job, and why."""
    console = show.console()
    for event in connection.client(context).events(uid, follow=follow):
        console.print(show.event_line(event), soft_wrap=True)


@app.command()
def nodes(context: typer.Context) -> None:
    """List the nodes of the fleet."""
    show.console().print(tables.nodes(connection.client(context).nodes(), time.time()))


@app.command()
def forgive(context: typer.Context, node: Annotated[str, typer.Argument(help="its name")]) -> None:
    """Hold nothing against a node any more: what it was excluded for is over."""
    connection.client(context).forgive(node)
    typer.echo(f"nothing is held against {node} any more")


def _followed(client: Client, uid: str, quiet: bool) -> JobView:
    try:
        return client.wait(uid) if quiet else show.follow(client, uid, show.console())
    except KeyboardInterrupt:
        typer.echo(f"\n{uid} goes on; 'phalanx cancel {uid}' ends it", err=True)
        raise typer.Exit(130) from None
