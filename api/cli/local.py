"""Commands that run Phalanx itself on this machine."""

from __future__ import annotations

import typer

app = typer.Typer()
