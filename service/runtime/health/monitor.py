"""One thread that watches a node's health: every period it looks at all sources, lets the policy decide, and tells.

What one fault leaves in several places comes within moments; so a first finding is waited on shortly, and all are
decided together, the likely root first. Remembers nothing beyond its own life, and knows no Ray and no jobs: `tell` is
whoever acts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from service.contracts.events import HealthFound
from service.core import policy as rules
from service.core.policy import Finding, History, Policy
from service.runtime.health import kernel, nvml
from service.runtime.health.findings import Devices, Events, Source
from service.runtime.health.kernel import CgroupKills, Kernel, OutOfMemory
from service.runtime.health.nvml import Nvml, Unavailable
from service.runtime.health.ports import SYS, Ports

log = logging.getLogger("phalanx.health")

PERIOD_S = 1.0
SETTLE_S = 0.2
MEMORY_S = 5.0  # a kill that only the cgroup counted is a process's that died so shortly before or after


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """What this node can be asked, and, for what it can't, why."""

    kernel: Kernel | None = None
    cgroup: CgroupKills | None = None  # where the kernel's log can't be read
    others: tuple[Source, ...] = ()
    missing: tuple[str, ...] = ()
    gpus: Nvml | None = None


class Monitor:
    def __init__(
        self, policy: Policy, sources: Sources, tell: Callable[[HealthFound], None],
        period_s: float = PERIOD_S, settle_s: float = SETTLE_S,
    ) -> None:  # fmt: skip
        self.policy, self.sources, self.tell = policy, sources, tell
        self.period_s, self.settle_s = period_s, settle_s
        self.history: History = ()
        self.counted: list[OutOfMemory] = []  # kills that only the cgroup knows of, and nobody has been named for
        self.failing: set[Source] = set()
        self.looking = threading.Lock()
        self.waiting: list[Finding] = []  # found, and not decided yet
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="health", daemon=True)

    def start(self) -> None:
        for why in self.sources.missing:
            log.warning("health: %s", why)
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()

    def out_of_memory(self, pid: int) -> OutOfMemory | None:
        """Whether the kernel ended this process for memory: ask once it was seen to die by SIGKILL."""
        at = time.time()
        with self.looking:
            self._look_at_kernel(at)
            if self.sources.kernel is not None:
                return next((kill for kill in reversed(self.sources.kernel.kills) if kill.pid == pid), None)
            self.counted = [kill for kill in self.counted if at - kill.at < MEMORY_S]
            return dataclasses.replace(self.counted.pop(), pid=pid) if self.counted else None

    def holders(self) -> frozenset[int]:
        """Pids of the processes that hold a GPU of this node; none where the driver can't say."""
        held: set[int] = set()
        if (gpus := self.sources.gpus) is not None:
            for device in gpus.devices():
                with contextlib.suppress(Exception):  # a device that is dying is found by its readings
                    held |= gpus.pids(device.index)
        return frozenset(held)

    def collect(self) -> list[Finding]:
        """What is new in all sources; nothing of it is decided."""
        at = time.time()
        with self.looking:
            self._look_at_kernel(at)
            found, self.waiting = self.waiting, []
        for source in self.sources.others:
            found += self._look(source, at)
        return found

    def decide(self, findings: Iterable[Finding]) -> list[HealthFound]:
        """What is to be told of findings of one moment."""
        told = []
        for finding in rules.order(self.policy, findings):
            self.history, decision = rules.decide(self.policy, self.history, finding)
            if decision is not None:
                devices = () if finding.device is None else (finding.device,)
                told.append(HealthFound(finding.node, decision.action, decision.sentence, finding.at, devices))
        return told

    def _watch(self) -> None:
        while not self.ended.is_set():
            found = self.collect()
            if found:
                self.ended.wait(self.settle_s)
                found += self.collect()
            for event in self.decide(found):
                log.warning("health: %s", event.message)
                self.tell(event)
            self.ended.wait(self.period_s)

    def _look_at_kernel(self, at: float) -> None:
        """With the lock: whoever asks for a kill may come before the next look."""
        if self.sources.kernel is not None:
            self.waiting += self._look(self.sources.kernel, at)
        if self.sources.cgroup is not None:
            self.counted += self.sources.cgroup.look(at)

    def _look(self, source: Source, at: float) -> list[Finding]:
        try:
            found = source.look(at)
        except Exception:  # a source that fails must not blind the others
            if source not in self.failing:
                log.exception("health: %s can't be read", type(source).__name__)
            self.failing.add(source)
            return []
        self.failing.discard(source)
        return found


def sources(
    node: str, log_path: Path = kernel.KMSG, sys: Path = SYS, connect: Callable[[], Nvml] = nvml.connect,
    cgroup: Path | None = None,
) -> Sources:  # fmt: skip
    """All that this node can be asked. `cgroup`: the file that counts kills, this process's own without it."""
    missing: list[str] = []
    gpus: Nvml | None = None
    try:
        gpus = connect()
    except Unavailable as why:
        missing.append(f"GPUs are not watched: {why}")
    records: Kernel | None = None
    try:
        devices = gpus.devices() if gpus else ()
        records = Kernel(node, kernel.open_log(log_path), devices)
    except kernel.Unreadable as why:
        instead = "Xids come from NVML's events" if gpus else "no Xid is seen"
        missing.append(f"{why}: {instead}, kills for memory are only counted")
    events = cgroup or kernel.own_cgroup()
    counted = CgroupKills(events) if records is None and events is not None else None
    others: list[Source] = [Ports(node, sys)]
    if gpus is not None:
        others += [Devices(node, gpus)] if records else [Events(node, gpus), Devices(node, gpus)]
    return Sources(records, counted, tuple(others), tuple(missing), gpus)
