"""Text made into tokens, on this machine: `phalanx data prepare`, `verify`, `show`; and what a step was given: `at`."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from api.cli import connection, sampled, show, tables
from service.contracts.errors import UserError
from workers.data import prepare as preparing
from workers.data import prepared
from workers.data.text import DataError

app = typer.Typer(no_args_is_help=True, help="Text, made into tokens once.")

Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="of prepared tokens: a path or URI")]


@app.command()
def prepare(
    source: Annotated[str, typer.Argument(help="path, glob or URI of text, JSON lines or Parquet; .gz, .bz2, .xz too")],
    to: Annotated[str, typer.Option("--to", help="folder to make: a path or URI")],
    tokenizer: Annotated[str, typer.Option(help="byte, or the path or URI of a tokenizer.json")] = "byte",
    field: Annotated[str, typer.Option(help="of the text, in JSON lines and Parquet")] = "text",
    workers: Annotated[int, typer.Option(min=1, help="processes")] = os.cpu_count() or 1,
    shard_tokens: Annotated[int, typer.Option(min=1, help="that a file of tokens has at most")] = (
        preparing.SHARD_TOKENS
    ),
) -> None:
    """Make text into tokens. Started again, it goes on where it was ended."""
    out = show.console(stderr=True)

    def told(done: int, files: int, tokens: int) -> None:
        out.print(f"{done} of {files} files, {tokens:,} tokens", soft_wrap=True)

    try:
        made = preparing.prepare(
            source, to, tokenizer=tokenizer, field=field, workers=workers, shard_tokens=shard_tokens, told=told
        )
    except (DataError, FileNotFoundError) as error:
        raise UserError(str(error), hint="what was made so far stays, and is not made again") from None
    typer.echo(f"{to}: {made.tokens:,} tokens of {made.documents:,} documents in {len(made.shards)} shards")


@app.command()
def verify(folder: Folder) -> None:
    """Read every byte, and say what is not as it was written."""
    made = _read(folder)
    problems = list(prepared.problems(folder, made))
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise UserError(f"{folder} is not good", hint="make it again: phalanx data prepare, into another folder")
    typer.echo(f"{folder}: {len(made.shards)} shards, all as they were written")


@app.command("show")
def describe(folder: Folder) -> None:
    """Tell what is in a folder of prepared tokens."""
    made, out = _read(folder), show.console()
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("tokens", f"{made.tokens:,} of {made.documents:,} documents")
    facts.add_row("tokenizer", f"{made.tokenizer.name}, {made.tokenizer.size:,} ids")
    facts.add_row("type", made.dtype)
    out.print(facts)
    out.print()
    out.print(tables.shards(made.shards))


@app.command()
def at(
    context: typer.Context,
    uid: Annotated[str, typer.Argument(metavar="JOB", help="uid of the job")],
    step: Annotated[int, typer.Option(min=1, help="that was completed")],
    rank: Annotated[int | None, typer.Option(min=0, help="only what this rank was given")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object a sample, with all tokens")] = False,
) -> None:
    """Show the samples of a step: their numbers, where they are from, what they say. Reads the data from here."""
    try:
        samples = sampled.at(connection.client(context), uid, step, rank)
    except (DataError, FileNotFoundError) as error:
        raise UserError(str(error), hint="the data has to be where the job finds it") from None
    if as_json:
        for sample in samples:
            typer.echo(json.dumps(dataclasses.asdict(sample)))
        return
    show.console().print(tables.samples(samples))


def _read(folder: str) -> prepared.Prepared:
    try:
        return prepared.read(folder if "://" in folder else str(Path(folder).absolute()))
    except DataError as error:
        raise UserError(str(error)) from None
