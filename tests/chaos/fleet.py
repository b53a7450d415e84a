"""A Phalanx whose nodes are hosts of a network: a Ray head, hosts in racks, the controller's keeper and the API.

Every host has an address, a Ray folder and a memory of its own; who is on it is known by its namespace, and ended by
pid. The store is a SQLite file and storage a folder, which is a small file system of its own so that it can be filled
and taken away. Knows how each part is lost and comes back; not when, nor what is expected then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

from api.client import Client
from service.contracts.cluster import NODE_LABEL, RACK_LABEL
from service.contracts.errors import ClusterError, PhalanxError
from service.keeper import Keeper
from service.local import HEALTH, OBJECT_STORE_BYTES
from service.runtime.health.fake import FakeLog
from tests.chaos.net import CORE, Net
from tests.e2e.world import until

ROOT = Path(__file__).parents[2]
GCS_PORT, NODE_PORT, OBJECT_PORT, REDIS_PORT, API_PORT = 6379, 6380, 6381, 6390, 7070
STORAGE_MB = 256
READY_S = 120.0
START_S = 90.0
STARTS = 2  # on a loaded machine one may take too long
INVENTORY_S = 30.0
LONG_AWAY_S = 600  # that a node waits for a head
LIMITS = {
    "step_s": 15, "learned_s": 8, "inspecting_s": 3,  # what stands still is found in less than half a minute
    "settle_s": 2, "cooldown_s": 1, "strikes_window_s": 30, "strikes_max": 1000,  # hosts are lost again and again
}  # fmt: skip

_LAUNCH = "import json, os, sys; e = json.loads(open(sys.argv[1]).read()); os.execvpe(sys.argv[2], sys.argv[2:], e)"
"""A keeper's child becomes a process on a host, in the fleet's environment and not in that of whoever made it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    host: str
    pid: int
    title: str


class Visitor(Client):
    """A client whose connections begin on a host."""

    def __init__(self, url: str, token: str, net: Net, host: str) -> None:
        super().__init__(url, token)
        self.net, self.host = net, host

    def _send(self, request: httpx.Request, stream: bool = False) -> httpx.Response:
        with self.net.inside(self.host):
            return super()._send(request, stream)


class Fleet:
    """`hosts` in two racks, `spares` more in the second one. `redis`: the head comes back with what it knew."""

    def __init__(self, home: Path, hosts: int = 4, slots: int = 2, spares: int = 1, redis: bool = False) -> None:
        self.home, self.slots, self.redis = home.absolute(), slots, redis
        names = [f"h{number}" for number in range(hosts + spares)]
        half = -(-hosts // 2)
        self.racks = {"r0": names[:half], "r1": names[half:]}
        self.rack_of = {host: rack for rack, members in self.racks.items() for host in members}
        self.up: set[str] = set()  # hosts that are to have a node
        self.servers: list[subprocess.Popen[bytes]] = []
        self.starters: dict[str, subprocess.Popen[bytes]] = {}  # host -> who started its node, and stays

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Everything is up and the API knows every host. After an error nothing is left."""
        self.net = Net({CORE: ["head"], **self.racks})
        try:
            self._make_folders()
            self.keeper = Keeper(self.home)
            if self.redis:
                self._start_redis()
            self.start_head()
            for host in self.rack_of:
                self.join(host)
                if not self.keeper.children:  # the controller has a node to be on
                    self._keep("service", "-m", "service")
                    self._keep("api", "-m", "api", "--port", str(API_PORT))
            until(self._ready, f"fleet (see {self.home}/*.log)", READY_S)
            self.keeper.keep()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End everything; `home` keeps the store and the logs. Safe to repeat."""
        if hasattr(self, "client"):
            self.client.close()
        if hasattr(self, "keeper"):
            self.keeper.stop()
        self.net.remove()
        for server in (*self.servers, *self.starters.values()):
            server.wait()
        self.servers, self.starters = [], {}
        for logs in self.temp.glob("*/session_*/logs"):
            shutil.copytree(logs, self.home / "ray" / logs.parts[-3], dirs_exist_ok=True)
        subprocess.run(("umount", "-l", str(self.storage)), capture_output=True, check=False)
        shutil.rmtree(self.snapshots, ignore_errors=True)
        shutil.rmtree(self.temp, ignore_errors=True)

    # Its parts

    def start_head(self) -> None:
        """Also one that was lost: with Redis it is the same cluster, else a new and empty one."""
        self._ray_start(
            "head", "--head", "--port", str(GCS_PORT), "--num-cpus", "0", "--include-dashboard", "false",
            "--dashboard-port", "8265",
        )  # fmt: skip

    def lose_head(self) -> None:
        """Ray's processes there die. The API, the controller's keeper and Redis are elsewhere, so to say."""
        self._clear("head")

    def join(self, host: str, grace_s: int = 0) -> None:
        """The host gets a node: its first, or one after the last has ended. `grace_s`: by a process that stays, as in a
        container, and that SIGTERM gives so long."""
        labels = f"{RACK_LABEL}={self.rack_of[host]},{NODE_LABEL}={host}"
        address = f"{self.net.addresses['head']}:{GCS_PORT}"
        arguments = ("--address", address, "--num-cpus", str(self.slots), "--labels", labels)
        if grace_s:
            environment = self.environment | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(grace_s)}
            command = self.net.command(host, *self._ray(host, *arguments, "--block"))
            with (self.home / f"{host}.log").open("wb") as out:
                self.starters[host] = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=out, stderr=out)
            until(lambda: self.answers(host, NODE_PORT), f"node on {host} (see {self.home}/{host}.log)", START_S)
        else:
            self._ray_start(host, *arguments)
        self.up.add(host)

    def notice(self, host: str, seconds: int) -> None:
        """Its provider says that it will take the host away, and when."""
        (node,) = [node for node in self.client.nodes() if node.name == host]
        command = (
            str(Path(sys.executable).parent / "ray"), "drain-node", "--node-id", node.id,
            "--address", f"{self.net.addresses['head']}:{GCS_PORT}", "--reason", "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message", "the provider wants it back", "--deadline-remaining-seconds", str(seconds),
        )  # fmt: skip
        subprocess.run(
            self.net.command("head", *command), env=self.environment, cwd=ROOT, capture_output=True, timeout=START_S,
            check=True,
        )  # fmt: skip

    def terminate(self, host: str) -> None:
        """SIGTERM to the process that started its node with a grace: what ends a container."""
        self.starters[host].terminate()

    def lose(self, host: str) -> None:
        """The host loses power: its processes and its memory are gone."""
        self.up.discard(host)
        self.net.end(host)
        if host in self.starters:
            self.starters.pop(host).wait()
        self.lose_memory(host)
        shutil.rmtree(self.temp / host, ignore_errors=True)

    def lose_memory(self, host: str) -> None:
        shutil.rmtree(self.snapshots / host, ignore_errors=True)

    def tend(self) -> list[str]:
        """What watches over nodes does: one that has ended by itself is started again, on a host that keeps its memory.
        The hosts where it had."""
        ended = [host for host in sorted(self.up) if not self.processes("raylet", host)]
        for host in ended:
            self._clear(host)
            self.join(host)
        return ended

    # Who is there

    def processes(self, title: str, host: str | None = None) -> list[Process]:
        """Those whose title, or whose program's name, begins so: `ray::Rank`, `ray::Controller`, `raylet`."""
        found = [
            Process(one, pid, named)
            for one in ([host] if host is not None else self.net.addresses)
            for pid in self.net.pids(one)
            if (named := _title(pid)).startswith(title)
        ]
        return sorted(found, key=lambda process: process.pid)

    def answers(self, host: str, port: int, asked_by: str = "head") -> bool:
        """Whether something listens there that another host reaches."""
        with self.net.inside(asked_by), socket.socket() as out:
            out.settimeout(0.5)
            return out.connect_ex((self.net.addresses[host], port)) == 0

    def inventory(self) -> dict[str, list[str]]:
        """Names of the actors and placement groups that Ray has."""
        command = (sys.executable, "-m", "tests.chaos.inventory", f"{self.net.addresses['head']}:{GCS_PORT}")
        done = subprocess.run(
            self.net.command("head", *command), env=self.environment, cwd=ROOT, capture_output=True, text=True,
            timeout=INVENTORY_S, check=True,
        )  # fmt: skip
        found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
        return found

    def kept(self, uid: str = "*") -> list[Path]:
        """Folders of snapshots, of one job or of any."""
        return sorted(self.snapshots.glob(f"*/{uid}"))

    # How it comes up

    def _make_folders(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.temp = Path(tempfile.mkdtemp(prefix=f"{self.net.prefix}-"))
        self.snapshots = Path("/dev/shm") / self.temp.name
        self.storage = self.home / "runs"
        self.storage.mkdir(exist_ok=True)
        subprocess.run(
            ("mount", "-t", "tmpfs", "-o", f"size={STORAGE_MB}m", f"{self.net.prefix}-storage", str(self.storage)),
            check=True,
        )
        self.kernels = {host: FakeLog(self.temp / f"{host}.kmsg") for host in self.rack_of}  # outlive their hosts
        token = self.temp / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.environment = {
            **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
            "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(LONG_AWAY_S),
            **{f"RAY_health_check_{name}": value for name, value in HEALTH.items()},
            **self._redis_environment(),
            "PHALANX_HOME": str(self.home), "PHALANX_SNAPSHOTS": str(self.snapshots),
            "PHALANX_SCRATCH": str(self.temp / "scratch"), "PHALANX_KERNEL_LOG": str(self.temp / "{node}.kmsg"),
            "PHALANX_RAY_ADDRESS": f"{self.net.addresses['head']}:{GCS_PORT}",
            "PHALANX_LIMITS": ",".join(f"{name}={value}" for name, value in LIMITS.items()),
            "PHALANX_API_HOST": self.net.addresses["head"],
        }  # fmt: skip
        (self.temp / "environment.json").write_text(json.dumps(self.environment))

    def _redis_environment(self) -> dict[str, str]:
        address = f"{self.net.addresses['head']}:{REDIS_PORT}"
        names = {"RAY_REDIS_ADDRESS": address, "RAY_external_storage_namespace": self.net.prefix}
        return names if self.redis else {}

    def _start_redis(self) -> None:
        folder = self.temp / "redis"
        folder.mkdir()
        command = (
            "redis-server", "--port", str(REDIS_PORT), "--bind", self.net.addresses["head"], "--dir", str(folder),
            "--protected-mode", "no", "--appendonly", "yes", "--logfile", str(folder / "log"),
        )  # fmt: skip
        self.servers.append(subprocess.Popen(self.net.command("head", *command)))
        until(lambda: self.answers("head", REDIS_PORT), f"Redis (see {folder}/log)", START_S)

    def _ray_start(self, host: str, *arguments: str) -> None:
        """One at a time: several at once time out."""
        command, said = self._ray(host, *arguments), ""
        for _ in range(STARTS):
            try:
                subprocess.run(
                    self.net.command(host, *command), env=self.environment, cwd=ROOT, capture_output=True, text=True,
                    timeout=START_S, check=True,
                )  # fmt: skip
                return
            except subprocess.SubprocessError as error:
                said = f"{error} {getattr(error, 'stderr', '')}"
                self._clear(host)
        raise ClusterError(f"no node on {host}: {said.strip()[-800:]}")

    def _ray(self, host: str, *arguments: str) -> tuple[str, ...]:
        return (
            str(Path(sys.executable).parent / "ray"), "start", "--node-ip-address", self.net.addresses[host],
            "--temp-dir", str(self.temp / host), "--object-store-memory", str(OBJECT_STORE_BYTES),
            "--node-manager-port", str(NODE_PORT), "--object-manager-port", str(OBJECT_PORT),
            "--include-log-monitor", "false", "--disable-usage-stats", "--log-style", "record", *arguments,
        )  # fmt: skip

    def _clear(self, host: str) -> None:
        """Whatever of Ray is there ends."""
        kept = {self.keeper.pid(name) for name in self.keeper.children} | {server.pid for server in self.servers}
        self.net.end(host, frozenset(pid for pid in kept if pid is not None))
        (self.temp / host / "ray_current_cluster").unlink(missing_ok=True)

    def _keep(self, name: str, *arguments: str) -> None:
        command = self.net.command("head", sys.executable, *arguments)
        self.keeper.start(name, "-c", _LAUNCH, str(self.temp / "environment.json"), *command)

    def _ready(self) -> bool:
        if ended := self.keeper.ended():
            raise ClusterError(f"{ended[0]} ended while the fleet started: see {self.home}/{ended[0]}.log")
        with contextlib.suppress(OSError, PhalanxError):
            if not hasattr(self, "client"):
                url = f"http://{self.net.addresses['head']}:{API_PORT}"
                self.client = Visitor(url, (self.home / "token").read_text().strip(), self.net, "head")
            return {node.name for node in self.client.nodes()} == self.up
        return False


def _title(pid: int) -> str:
    """What a process calls itself, or what is run in it."""
    with contextlib.suppress(psutil.Error):
        program = next(iter(psutil.Process(pid).cmdline()), "").strip()  # a title that was set has blanks behind it
        return program if program.startswith("ray::") else Path(program).name
    return ""
