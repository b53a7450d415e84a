"""A whole Phalanx on one machine: a Ray head and simulated nodes in racks, the controller's keeper, the API.

`python -m service.local --home DIR` starts it and stays until SIGTERM; the roster lets another process end it, also
when the one that started it was killed. Every process is ended by its pid.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from service import roster
from service.contracts.cluster import CONTROL, NODE_LABEL, RACK_LABEL, ROLE_LABEL
from service.contracts.errors import ClusterError, Conflict, PhalanxError, UserError
from service.keeper import Keeper
from service.settings import Settings

READY_S = 60.0
OBJECT_STORE_BYTES = 80_000_000
HEALTH = {"initial_delay_ms": "1000", "period_ms": "1000", "timeout_ms": "1000", "failure_threshold": "3"}
"""A node's death is known in about 3 s instead of 15."""
LIMITS = "settle_s=5,cooldown_s=2"
"""A node that comes back is used again in seconds: nothing is wrong with a simulated one."""


class LocalFleet:
    """`racks` x `nodes` simulated nodes of `slots` CPU slots, each with an address of its own on the loopback."""

    def __init__(self, home: Path, racks: int = 2, nodes: int = 2, slots: int = 2, api_port: int = 7070) -> None:
        self.home, self.racks, self.nodes, self.slots, self.api_port = (
            home.absolute(),
            racks,
            nodes,
            slots,
            api_port,
        )
        self.temp = ""
        self.cluster: Any = None
        self.members: dict[str, Any] = {}
        self.keeper = Keeper(self.home, restarted=self._record)

    def start(self) -> None:
        """Everything is up and the API knows the fleet; the API and the controller's keeper are started again when
        they end. Raises a PhalanxError, and then nothing is left.
        """
        _make(self.home)
        if roster.running(self.home):
            raise Conflict(
                f"a fleet runs in {self.home} already",
                hint="`phalanx down` ends it; PHALANX_HOME names another folder",
            )
        _check_free(Settings.read().api_host, self.api_port)
        self.temp = tempfile.mkdtemp(prefix="phx-")
        try:
            os.environ.update(self.environment())
            self._start_ray()
            self._record()
            (self.home / "api.json").unlink(missing_ok=True)  # of a fleet that was killed
            self.keeper.start("service", "-m", "service")
            self.keeper.start("api", "-m", "api", "--port", str(self.api_port))
            self._record()
            self._wait_ready()
            self._keep_port()
            self.keeper.keep()
        except BaseException:
            self.stop()
            raise

    def environment(self) -> dict[str, str]:
        """Of every process of this fleet."""
        token = self.home / "ray_token"
        if not token.exists():
            descriptor = os.open(token, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
            os.write(descriptor, secrets.token_hex(32).encode())
            os.close(descriptor)
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": self.temp,  # where Ray notes which cluster is this machine's: ours is not to be found there
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            **{f"RAY_health_check_{name}": value for name, value in HEALTH.items()},
            "PHALANX_HOME": str(self.home),
            "PHALANX_SCRATCH": str(Path(self.temp) / "scratch"),
            "PHALANX_LIMITS": os.environ.get("PHALANX_LIMITS", LIMITS),
            # The fleet is of who started it, and so is all that its processes can read.
            "PHALANX_OWN_CODE": os.environ.get("PHALANX_OWN_CODE", "*"),
            "PHALANX_SECRETS": os.environ.get("PHALANX_SECRETS", "env:*,file:/*"),
            "PHALANX_KERNEL_LOG": str(Path(self.temp) / "{node}.kmsg"),
            "PHALANX_SNAPSHOTS": roster.memory(self.temp),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
        }

    def _start_ray(self) -> None:
        from ray.cluster_utils import Cluster

        (Path(self.temp) / "ray").mkdir()  # of the note; Ray makes it only where it begins a cluster by itself
        common = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        labels = {ROLE_LABEL: CONTROL}  # the controller is there, and goes with no node that trains
        head = {"num_cpus": 0, "node_ip_address": "127.0.77.1", "temp_dir": self.temp, "labels": labels, **common}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        os.environ["PHALANX_RAY_ADDRESS"] = self.cluster.address
        for number in range(self.racks * self.nodes):
            self.join(f"n{number}", f"r{number // self.nodes}", f"127.0.77.{number + 2}")

    def join(self, name: str, rack: str, address: str) -> None:
        """One more node. What its kernel says is what is written to its log: all share the machine's real one."""
        (Path(self.temp) / f"{name}.kmsg").touch()
        self.members[name] = self.cluster.add_node(
            num_cpus=self.slots, node_ip_address=address, object_store_memory=OBJECT_STORE_BYTES,
            labels={RACK_LABEL: rack, NODE_LABEL: name},
        )  # fmt: skip

    def lose(self, name: str) -> None:
        """The node dies with all its processes, without a word."""
        node = self.members.pop(name)
        roots = [info.process.pid for infos in node.all_processes.values() for info in infos]
        family = [process for pid in roots for process in roster.family(pid)]
        self.cluster.remove_node(node, allow_graceful=False)
        roster.end(family)
        shutil.rmtree(Path(roster.memory(self.temp)) / name, ignore_errors=True)  # and its memory with it

    def _record(self) -> None:
        roster.record(self.home, self.temp)

    def _keep_port(self) -> None:
        """Also an API that took a free port comes back where its clients know it."""
        url = str(json.loads((self.home / "api.json").read_text())["url"])
        self.keeper.children["api"].arguments = ("-m", "api", "--port", url.rpartition(":")[2])

    def _wait_ready(self) -> None:
        """The API answers, and the controller has written this fleet to the store."""
        from service.store.jobs import Store

        deadline = time.monotonic() + READY_S
        ours = {node.node_id for node in self.members.values()}
        store = Store.open(Settings.read().store)
        try:
            while not ((self.home / "api.json").exists() and {node.id for node in store.nodes()} == ours):
                if ended := self.keeper.ended():
                    raise ClusterError(
                        f"{ended[0]} ended while the fleet started", hint=f"see {self.home}/{ended[0]}.log"
                    )
                if time.monotonic() > deadline:
                    raise ClusterError(f"the fleet was not ready in {READY_S:.0f} s", hint=f"see {self.home}/*.log")
                time.sleep(0.1)
        finally:
            store.close()

    def stop(self) -> None:
        """End everything; safe to repeat."""
        self.keeper.stop()
        family = roster.family(os.getpid())[1:]
        if self.cluster is not None:
            self.cluster.shutdown()
        roster.end(family)
        self.cluster, self.members = None, {}
        roster.forget(self.home, self.temp)


def _make(home: Path) -> None:
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "PHALANX_HOME names another folder"
        raise UserError(f"{home} can't be the home of a fleet: {error.strerror}", hint=hint) from None


def _check_free(host: str, port: int) -> None:
    """Known at once, and not only when Ray is up."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        hint = "--api-port names another port; 0 takes a free one"
        raise UserError(f"the API can't listen on {host}:{port}: {error.strerror or error}", hint=hint) from None


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    over = threading.Event()
    try:
        fleet = _fleet()
        _end_by_signal(over)
        fleet.start()
        _end_by_signal(over)  # each Ray node has put a handler of its own there, which waits for running jobs
    except PhalanxError as error:
        sys.stderr.write(f"error: {error.message}\n{f'hint: {error.hint}' if error.hint else ''}\n")
        return 2 if isinstance(error, UserError) else 3
    try:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        over.wait()
    finally:
        fleet.stop()
    return 0


def _end_by_signal(over: threading.Event) -> None:
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: over.set())


def _fleet() -> LocalFleet:
    settings = Settings.read()
    parser = argparse.ArgumentParser("python -m service.local", description=__doc__)
    parser.add_argument("--home", type=Path, default=settings.home)
    parser.add_argument("--racks", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=2, help="in a rack")
    parser.add_argument("--slots", type=int, default=2, help="of a node")
    parser.add_argument("--api-port", type=int, default=settings.api_port)
    options = parser.parse_args()
    return LocalFleet(options.home, options.racks, options.nodes, options.slots, options.api_port)


if __name__ == "__main__":
    sys.exit(main())
