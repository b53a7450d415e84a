"""The training under two torchrun agents of four ranks, one of which hosts the rendezvous; a lost one starts again.

Agents don't agree on how often they restarted: the ranks' store is one of its own in every round of the rendezvous, and
not the agents', so that no rank meets what a former round left there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from service import roster
from tests.bench import recovery_rank
from tests.bench.recovery_fault import VICTIM, Done, Fault, again

AGENTS = 2


class Torchrun:
    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.agents = [self.start(node) for node in range(AGENTS)]

    def start(self, node: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={AGENTS}", "--nproc-per-node=4",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf=is_host={int(node == 0)}",
            "--rdzv-id=recovery", "--local-addr=127.0.0.1", "--max-restarts=100", f"--log-dir={self.folder}",
            "-m", "tests.bench.recovery_rank", str(self.folder),
        ]  # fmt: skip
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(command, env=environment, stdout=sys.stderr)

    def steps(self) -> Sequence[Done]:
        return recovery_rank.steps(self.folder)

    def mend(self) -> None:
        """`kill` has started a new agent."""

    def kill(self, fault: Fault) -> None:
        pid, _ = recovery_rank.newest(self.folder, VICTIM)
        if fault == "rank":
            os.kill(pid, signal.SIGKILL)
            return
        node = next(number for number, agent in enumerate(self.agents) if pid in pids(agent))
        roster.end(roster.family(self.agents[node].pid))
        self.agents[node].wait()
        self.agents[node] = self.start(node)

    def redone(self, broken: int) -> int:
        return again(self.steps(), broken)

    def parts(self, broken: int) -> Mapping[str, float]:
        return {}


def pids(agent: subprocess.Popen[bytes]) -> list[int]:
    return [process.pid for process in roster.family(agent.pid)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Torchrun]:
    yield Torchrun(folder)
