"""Which API a command talks to: as options of `phalanx`, the environment, or the home's files say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import typer

from api.client import Client


@dataclasses.dataclass(frozen=True, slots=True)
class Connection:
    home: Path
    url: str | None
    token: str | None

    def client(self) -> Client:
        return Client.find(self.home, self.url, self.token)


def client(context: typer.Context) -> Client:
    """The client of this invocation, closed when the command ends."""
    found = context.find_object(Connection)
    assert found is not None
    made = found.client()
    context.call_on_close(made.close)
    return made


def home(context: typer.Context) -> Path:
    """Folder of the fleet that this invocation is about."""
    found = context.find_object(Connection)
    assert found is not None
    return found.home
