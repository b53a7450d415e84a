"""`phalanx plan claims`: what is said of large training runs, computed by the cost model of today."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from service.core.plan import claims as worked


def claims(as_json: Annotated[bool, typer.Option("--json", help="as JSON, and nothing else")] = False) -> None:
    """Agree with or dispute claims about large training runs, a line each, with the numbers that say so."""
    found = worked.every()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(claim) for claim in found]))
        return
    for claim in found:
        typer.echo(claim.line)
