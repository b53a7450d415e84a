"""A job file, YAML or JSON, as the mapping that its author meant. The API checks what the fields mean."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from api.cli import variables
from service.contracts import errors

HINT = "name a YAML or JSON file"
SWEEP = "sweep"

VarOption = Annotated[
    list[str] | None, typer.Option("--var", metavar="NAME=VALUE", help="of a variable of the file, in place of its own")
]


def read(path: Path, given: Sequence[str] | None = None) -> dict[str, Any]:
    """The job, its variables filled in. `given`: NAME=VALUE each."""
    document = load(path)
    if SWEEP in document:
        hint = "'phalanx sweep submit' submits them; without `sweep` it is one"
        raise errors.UserError(f"{path} is a sweep of several jobs", hint=hint, field=SWEEP)
    return variables.fill(document, variables.given(given or ()))


def load(path: Path) -> dict[str, Any]:
    """The file as it is written; `-` reads standard input."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
    except OSError as error:
        raise errors.UserError(f"{path} can't be read: {error.strerror}", hint=HINT) from None
    except UnicodeDecodeError:
        raise errors.UserError(f"{path} is not text", hint=HINT) from None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise errors.UserError(f"{path} is neither YAML nor JSON: {_place(error)}") from None
    except (RecursionError, ValueError) as error:  # nested too deep; a date that isn't one, a number of 5000 digits
        raise errors.UserError(f"{path} can't be read as YAML: {error}") from None
    if not isinstance(value, dict):
        raise errors.UserError(
            f"{path} holds no job: a job is a mapping of fields such as model, data, train, resources",
            hint="see the example in the README",
        )
    return value


def _place(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error)
