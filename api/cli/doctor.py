"""`phalanx doctor`: whether what an installation needs is there, and what to do where it is not. It leaves no trace."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator

import typer

from api.cli import connection, show, tables
from api.client import Client
from service.contracts import errors
from service.settings import Settings
from service.store.jobs import Store
from workers.checkpoint.storage import Storage

app = typer.Typer()

SKEW_S = 5.0  # between this clock and the database's
FLOORS = {"torch": (2, 13), "ray": (2, 60)}
KNOCK_S = 3.0


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    what: str
    good: bool
    told: str
    hint: str = ""


@app.command()
def doctor(context: typer.Context) -> None:
    """Check the installation: versions, store, storage, clock, Ray, API. Exit code 1: something is wrong."""
    found = list(examined(Settings.read(), lambda: connection.client(context)))
    show.console().print(tables.findings(map(dataclasses.astuple, found)))
    if not all(finding.good for finding in found):
        raise typer.Exit(1)


def examined(settings: Settings, client: Callable[[], Client]) -> Iterator[Finding]:
    yield from versions()
    yield store(settings)
    yield clock(settings)
    yield storage(settings.storage)
    yield ray(settings.ray_address)
    yield api(client)


def versions() -> Iterator[Finding]:
    python = sys.version_info[:3]
    told = ".".join(map(str, python))
    yield Finding("python", python[:2] == (3, 11), told, "" if python[:2] == (3, 11) else "use Python 3.11")
    for name, floor in FLOORS.items():
        least = ".".join(map(str, floor))
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, False, "is not installed", f"pip install '{name}>={least}'")
            continue
        known = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
        yield Finding(name, known >= floor, version, "" if known >= floor else f"pip install '{name}>={least}'")


def store(settings: Settings) -> Finding:
    def look() -> str:
        opened = Store.open(settings.store, migrate=False)
        try:
            holder, epoch = opened.holder()
            who = "a controller leads" if holder else "no controller leads"
            return f"its tables are of this version; {who}, epoch {epoch}"
        finally:
            opened.close()

    return _tried("store", look)


def clock(settings: Settings) -> Finding:
    """The lease is kept by the database's clock; times of events are of the machines."""

    def look() -> str:
        opened = Store.open(settings.store, migrate=False)
        try:
            skew = time.time() - opened.now()
        finally:
            opened.close()
        if abs(skew) > SKEW_S:
            raise errors.ClusterError(f"this clock is {skew:+.1f} s from the store's", hint="run an NTP client on both")
        return f"{skew:+.2f} s from the store's"

    return _tried("clock", look)


def storage(root: str) -> Finding:
    """A checkpoint is published by one conditional create: the second of two must be refused."""

    def look() -> str:
        place = Storage.open(root)
        name = f".doctor-{secrets.token_hex(6)}"
        try:
            began = time.monotonic()
            place.create(name, b"phalanx")
            try:
                place.create(name, b"again")
            except FileExistsError:
                pass
            else:
                hint = "use a file system, or an object store with conditional writes (If-None-Match)"
                raise errors.ClusterError("it lets two writers create the same object", hint=hint)
            if place.read(name) != b"phalanx":
                raise errors.ClusterError("it does not give back what was written", hint="use another storage")
            return f"{root}: written once, read back, in {time.monotonic() - began:.2f} s"
        finally:
            place.delete(name)

    return _tried("storage", look)


def ray(address: str) -> Finding:
    if not address:
        return Finding("ray", True, "the Ray of this machine is used; PHALANX_RAY_ADDRESS names a cluster")

    def look() -> str:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        with socket.create_connection((host, int(port)), KNOCK_S):
            return f"{address} answers"

    return _tried("ray", look)


def api(client: Callable[[], Client]) -> Finding:
    def look() -> str:
        here = client()
        count = len(here.nodes())
        return f"{here.url} answers; {count} node{'' if count == 1 else 's'}"

    return _tried("api", look)


def _tried(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, look())
    except errors.PhalanxError as error:
        return Finding(what, False, error.message, error.hint)
    except (OSError, ValueError) as error:
        hint = "is its address right, and may this machine reach it?"
        return Finding(what, False, f"{type(error).__name__}: {error}", hint)
