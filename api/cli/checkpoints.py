"""`phalanx checkpoint`: look at a job's checkpoints, check them, go back to one, fork or export from one."""

from __future__ import annotations

import enum
import time
from typing import Annotated, Any

import typer
import yaml

from api.cli import connection, show, tables
from api.client import Client
from api.views import Asked, EventView
from service.contracts import errors

app = typer.Typer(no_args_is_help=True, help="The checkpoints of a job.")

Uid = Annotated[str, typer.Argument(metavar="JOB", help="uid of the job")]
Step = Annotated[int, typer.Argument(metavar="STEP", min=0)]
MaybeStep = Annotated[int | None, typer.Argument(metavar="STEP", min=0, help="default the newest good one")]
Attempt = Annotated[int | None, typer.Option(min=0, help="that published it; default the newest")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="don't wait until it is done")]
AsJson = Annotated[bool, typer.Option("--json", help="as JSON, and nothing else")]


class DType(enum.StrEnum):
    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@app.command()
def ls(
    context: typer.Context,
    uid: Uid,
    everything: Annotated[bool, typer.Option("--all", help="those too that were removed")] = False,
    as_json: AsJson = False,
) -> None:
    """List them, newest first."""
    found = [one for one in connection.client(context).checkpoints(uid) if everything or one.stored is not False]
    if as_json:
        typer.echo("\n".join(one.model_dump_json() for one in found))
    else:
        show.console().print(tables.checkpoints(found, time.time()))


@app.command("show")
def show_(
    context: typer.Context, uid: Uid, step: MaybeStep = None, attempt: Attempt = None, as_json: AsJson = False
) -> None:
    """Show what is in one: layout, model, tensors, bytes, samples."""
    found = connection.client(context).checkpoint(uid, step, attempt)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        show.checkpoint(show.console(), found, time.time())


@app.command()
def verify(
    context: typer.Context,
    uid: Uid,
    step: MaybeStep = None,
    everything: Annotated[bool, typer.Option("--all", help="every good one")] = False,
    attempt: Attempt = None,
    no_wait: NoWait = False,
) -> None:
    """Have every byte read and checked; one that is damaged is never used again. Exit code 1: one was."""
    client = connection.client(context)
    if everything and (step is not None or attempt is not None):
        raise errors.UserError("--all verifies every good checkpoint; name no step with it")
    if everything:
        asked = [client.verify(uid, one.step, one.attempt) for one in client.checkpoints(uid) if one.good]
    else:
        asked = [client.verify(uid, step, attempt)]
    answers = [_answer(client, uid, one, no_wait) for one in asked]
    if any(event is not None and event.type == "CheckpointRejected" for event in answers):
        raise typer.Exit(1)


@app.command()
def restore(context: typer.Context, uid: Uid, step: Step, attempt: Attempt = None) -> None:
    """Have a job go back to one; newer ones are never used again."""
    job = connection.client(context).restore(uid, step, attempt)
    typer.echo(f"{job.uid} goes back to the checkpoint of step {step}; 'phalanx events {job.uid} -f' tells how")


@app.command()
def fork(
    context: typer.Context,
    uid: Uid,
    step: MaybeStep = None,
    attempt: Attempt = None,
    name: Annotated[str | None, typer.Option(help="of the new job")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="as train.steps=400; null removes a field")
    ] = None,
    key: Annotated[str | None, typer.Option(help="idempotency key: the same one never forks twice")] = None,
) -> None:
    """Begin a new job at one, also of a job that is over."""
    patch = overrides([*(changes or ()), *([] if name is None else [f"name={name}"])])
    job = connection.client(context).fork(uid, step, attempt, patch, key)
    start = job.spec["init_from"]
    typer.echo(f"submitted {job.uid}, which begins at step {start['step']} of {start['job']}")


@app.command()
def evaluate(
    context: typer.Context,
    uid: Uid,
    step: MaybeStep = None,
    attempt: Attempt = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]URI", help="text to measure the loss on; repeat it for more")
    ] = None,
    batches: Annotated[int, typer.Option(help="global batches of each; a smaller source is measured whole")] = 8,
) -> None:
    """Begin a job that measures the loss of one on other text, and trains nothing."""
    if not data:
        raise errors.UserError("--data names the text to evaluate on", hint="--data web=s3://bucket/valid.parquet")
    asked = {
        "data": [_named(one) for one in data],
        "batches": batches,
        "only": True,
        "metric": "loss",
    }
    job = connection.client(context).fork(uid, step, attempt, {"eval": asked})
    typer.echo(f"submitted {job.uid}, which evaluates step {job.spec['init_from']['step']} of {uid}")


@app.command()
def export(
    context: typer.Context,
    uid: Uid,
    step: MaybeStep = None,
    to: Annotated[str, typer.Option(help="new folder under a storage root of the service: a path or URI")] = "",
    dtype: Annotated[DType | None, typer.Option(help="of its tensors; default as stored")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="the adapters alone, as PEFT has them")] = False,
    attempt: Attempt = None,
    no_wait: NoWait = False,
) -> None:
    """Write its model as a Hugging Face folder."""
    if not to:
        raise errors.UserError("--to names the folder to write, under a storage root of the service")
    client = connection.client(context)
    answer = _answer(client, uid, client.export(uid, to, step, attempt, dtype, adapter), no_wait)
    if answer is not None and answer.type == "CheckpointExportFailed":
        raise typer.Exit(1)


def _named(text: str) -> dict[str, str]:
    """`web=/data/web.txt`, or without a name; a URI may have signs of equality later."""
    name, equals, source = text.partition("=")
    named = bool(equals) and "/" not in name and ":" not in name
    return {"name": name, "source": source} if named else {"source": text}


def overrides(changes: list[str]) -> dict[str, Any]:
    """`a.b=1` as `{"a": {"b": 1}}`; values are YAML."""
    made: dict[str, Any] = {}
    for change in changes:
        path, equals, text = change.partition("=")
        *parents, name = path.split(".")
        if not (equals and all((*parents, name))):
            raise errors.UserError(f"--set {change} is no change", hint="write it as --set train.steps=400")
        inner = made
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise errors.UserError(f"--set {change}: {parent} was set to a value before")
        try:
            inner[name] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise errors.UserError(f"--set {change}: the value can't be read as YAML: {error}") from None
    return made


def _answer(client: Client, uid: str, asked: Asked, no_wait: bool) -> EventView | None:
    """What came of it, said; where storage did not let itself be read, that is a ClusterError."""
    if no_wait:
        typer.echo(f"{asked.kind} of step {asked.checkpoint.step} is asked for; 'phalanx events {uid} -f' tells of it")
        return None
    event = client.answer(uid, asked)
    if event.type == "CheckpointCheckFailed":
        raise errors.ClusterError(event.reason, hint="nothing is marked; try again")
    typer.echo(event.reason)
    return event
