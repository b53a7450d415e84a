"""What a node needs before it is used again: devices are reset, the node is probed. Each as a Ray task on the node.

The core says what is needed, by what it holds against nodes; each answer is an event. What a node that died meanwhile
was asked for is asked again when it is back.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from service.contracts import events
from service.contracts.cluster import Node
from service.core import health
from service.core.state import State

log = logging.getLogger("phalanx.care")

THREADS = 8
PROBE_S = 900.0
RESET_S = 300.0

Devices = tuple[int, ...]


def reset(devices: Devices) -> str:
    """Why these GPUs of this node could not be reset; empty: they were."""
    return _failed(("nvidia-smi", "--gpu-reset", "-i", ",".join(map(str, devices))), RESET_S)[0]


def probe(devices: Devices) -> str:
    """What a probe of each of these GPUs of this node, or without any of its CPU, found; empty: nothing."""
    names = [f"cuda:{index}" for index in devices] or ["cpu"]
    with ThreadPoolExecutor(len(names)) as pool:
        return "; ".join(found for each in pool.map(_probed, names) for found in each)


def _probed(device: str) -> list[str]:
    problem, said = _failed((sys.executable, "-m", "workers.probe", "--device", device, "--json"), PROBE_S)
    try:
        findings = json.loads(said.splitlines()[-1])["findings"]
    except (IndexError, KeyError, ValueError):
        return [f"{device}: {problem or 'it said nothing'}"]
    return [f"{device}: {one['check']}: {one['message']}" for one in findings]


def on(node: Node, task: Callable[[Devices], str], devices: Devices) -> str:
    """The task's answer from that node. RayError: none came."""
    there = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return str(ray.get(ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(task).remote(devices)))


class Care:
    """`ask` has a node do something."""

    def __init__(self, inbox: Any, ask: Callable[[Node, Callable[[Devices], str], Devices], str] = on) -> None:
        self.inbox, self.ask = inbox, ask
        self.busy: set[str] = set()  # ids of nodes that are at it; one thing after the other
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="care")
        self.over = threading.Event()

    def close(self) -> None:
        self.over.set()
        self.pool.shutdown(wait=False, cancel_futures=True)

    def look(self, state: State) -> None:
        """Begin what is needed and not under way. An excluded node waits for an operator, or for its reboot."""
        resets = health.resettable(state)
        for node in state.fleet.nodes:
            own = state.health.get(node.name)
            if own is None or own.excluded or node.id in self.busy:
                continue
            if node.name in resets:
                self._begin(node, partial(self._reset, node, resets[node.name]))
            elif own.needs_probe:
                self._begin(node, partial(self._probe, node))

    def _begin(self, node: Node, work: Callable[[], events.NodeEvent]) -> None:
        self.busy.add(node.id)
        self.pool.submit(self._do, node, work)

    def _do(self, node: Node, work: Callable[[], events.NodeEvent]) -> None:
        try:
            event = work()
            if not self.over.is_set():
                self.inbox.put(event)
        except ray.exceptions.RayError as error:
            log.warning("%s gave no answer: %s", node.name, type(error).__name__)
        finally:
            self.busy.discard(node.id)

    def _reset(self, node: Node, devices: Devices) -> events.NodeEvent:
        problem = self.ask(node, reset, devices)
        if problem:
            return events.HealthFound(node.name, "reboot", f"could not be reset: {problem}", time.time(), devices)
        return events.DevicesReset(node.name, devices, time.time())

    def _probe(self, node: Node) -> events.NodeEvent:
        problem = self.ask(node, probe, tuple(range(node.slots)) if node.device == "gpu" else ())
        return events.NodeProbed(node.name, not problem, problem or "its probe passed", time.time())


def _failed(command: tuple[str, ...], timeout_s: float) -> tuple[str, str]:
    """(why it failed or nothing, what it said)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), ""
    last = next(iter(reversed((done.stderr or done.stdout).strip().splitlines())), "")
    return ("" if done.returncode == 0 else f"{last or 'no word'} (exit code {done.returncode})"), done.stdout
