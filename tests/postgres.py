"""A real PostgreSQL, where one is installed: on a socket in a folder of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa


def program(name: str) -> str | None:
    known = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return shutil.which(name, path=os.pathsep.join([*map(str, known), os.environ.get("PATH", "")]))


def found() -> bool:
    tools = program("initdb"), program("pg_ctl"), importlib.util.find_spec("psycopg")
    return None not in tools


class Server:
    def __init__(self, folder: str) -> None:
        self.folder, self.data = folder, f"{folder}/data"
        self.user = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
        if self.user:
            shutil.chown(folder, self.user)
        self._run("initdb", "-D", self.data, "-U", "phalanx", "-E", "UTF8", "-A", "trust", "--no-sync")

    @property
    def url(self) -> sa.URL:
        return sa.URL.create("postgresql+psycopg", "phalanx", database="postgres", query={"host": self.folder})

    def start(self) -> None:
        options = f"-k {self.folder} -c listen_addresses= -c fsync=off"
        self._run("pg_ctl", "-D", self.data, "-o", options, "-l", f"{self.folder}/log", "-w", "start")

    def stop(self) -> None:
        """At once, as if its machine were gone."""
        self._run("pg_ctl", "-D", self.data, "-m", "immediate", "-w", "stop")

    def _run(self, name: str, *arguments: str) -> None:
        command = [program(name) or name, *arguments]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, user=self.user, cwd=self.folder, env={"LC_ALL": "C"}
        )


@contextlib.contextmanager
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="phalanx-pg-") as folder:
        made = Server(folder)
        made.start()
        try:
            yield made
        finally:
            made.stop()
