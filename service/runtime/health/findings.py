"""What is found in a node's GPUs: by two readings of a device, by NVML's events, by a probe. Knows no policy.

Counters count from the first reading on: what was there before is not this watch's. States are found when they begin,
also where they began before; slowdowns as long as they last, since how long is what matters.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from service.core.policy import Finding
from service.runtime.health.nvml import Nvml, Reading

READ_EVERY_S = 10.0
PATIENCE_S = 2.0  # that a look waits for the readings
SILENT_S = 60.0  # a device that is not read by then does not answer


class Source(Protocol):
    """One place where findings come from. A look waits for seconds at most."""

    def look(self, at: float) -> list[Finding]:
        """What is new since the last look."""
        ...


class Devices:
    """A source: the devices of this node, read one after the other.

    A driver whose device is dying may never answer. So a thread asks, and one that hangs is left to itself and found.
    """

    def __init__(
        self, node: str, nvml: Nvml, every_s: float = READ_EVERY_S, patience_s: float = PATIENCE_S,
        silent_s: float = SILENT_S,
    ) -> None:  # fmt: skip
        self.node, self.nvml = node, nvml
        self.every_s, self.patience_s, self.silent_s = every_s, patience_s, silent_s
        self.last: dict[int, Reading] = {}
        self.answers: queue.SimpleQueue[list[Reading] | Exception] = queue.SimpleQueue()
        self.asked_at: float | None = None
        self.next_at = float("-inf")
        self.asking: int | None = None  # the device that is being read
        self.told_silent = False

    def look(self, at: float) -> list[Finding]:
        if self.asked_at is None:
            if at < self.next_at:
                return []
            self.asked_at, self.next_at = at, at + self.every_s
            threading.Thread(target=self._ask, name="nvml", daemon=True).start()
        try:
            readings = self.answers.get(timeout=self.patience_s)
        except queue.Empty:
            return self._silent(at, self.asked_at)
        self.asked_at, self.told_silent = None, False
        if isinstance(readings, Exception):
            raise readings
        found = [finding for now in readings for finding in compare(self.node, self.last.get(now.index), now, at)]
        self.last = {reading.index: reading for reading in readings}
        return found

    def _ask(self) -> None:
        try:
            readings = []
            for device in self.nvml.devices():
                self.asking = device.index
                readings.append(self.nvml.read(device.index))
            self.answers.put(readings)
        except Exception as error:  # of a thread: whoever waits for the answer gets it
            self.answers.put(error)

    def _silent(self, at: float, since: float) -> list[Finding]:
        if self.told_silent or at - since < self.silent_s:
            return []
        self.told_silent = True
        waited = at - since
        message = f"NVML has not answered for {waited:.0f} s"
        return [Finding(self.node, self.asking, "pcie", "silent", at, waited, message=message)]


class Events:
    """A source: Xids by NVML's events, for a node whose kernel log can't be read."""

    def __init__(self, node: str, nvml: Nvml) -> None:
        self.node, self.nvml = node, nvml
        nvml.xids()  # begins to listen

    def look(self, at: float) -> list[Finding]:
        return [Finding(self.node, event.index, "xid", event.xid, at) for event in self.nvml.xids()]


def compare(node: str, before: Reading | None, now: Reading, at: float) -> list[Finding]:
    """What is new in `now`; without a reading before, the states that it finds."""
    old = before or Reading(now.index)
    if now.lost:
        return [] if old.lost else [Finding(node, now.index, "pcie", "lost", at, message="it does not answer")]
    return [*_states(node, old, now, at), *_counters(node, before, now, at), *_links(node, before, now, at)]


def _states(node: str, old: Reading, now: Reading, at: float) -> Iterator[Finding]:
    index = now.index
    if now.recovery_action is not None and now.recovery_action != (old.recovery_action or 0):
        yield Finding(node, index, "recovery_action", now.recovery_action, at, now.recovery_action)
    if now.remap_pending and not old.remap_pending:
        yield Finding(node, index, "remap", "pending", at)
    if now.remap_failed and not old.remap_failed:
        yield Finding(node, index, "remap", "failed", at)
    if _narrow(now) and (not _narrow(old) or now.pcie_width != old.pcie_width):
        message = f"{now.pcie_width} lanes of {now.pcie_width_max}"
        yield Finding(node, index, "pcie", "width", at, now.pcie_width or 0, message=message)
    for name in sorted(now.slowdowns):
        yield Finding(node, index, "thermal", name, at)


def _counters(node: str, before: Reading | None, now: Reading, at: float) -> Iterator[Finding]:
    if before is None or before.lost:
        return
    if now.ecc_volatile is not None:
        count, code = _more(before.ecc_volatile, now.ecc_volatile), "volatile_uncorrected"
    else:
        count, code = _more(before.ecc_aggregate, now.ecc_aggregate), "aggregate_uncorrected"
    if count:
        yield Finding(node, now.index, "ecc", code, at, count, message=f"{count} more")


def _links(node: str, before: Reading | None, now: Reading, at: float) -> Iterator[Finding]:
    """Links that were never up are not wired."""
    known = {link.number: link for link in before.links} if before else {}
    for link in now.links:
        old, place = known.get(link.number), f"link {link.number}"
        if old and old.up and not link.up:
            yield Finding(node, now.index, "nvlink", "down", at, place=place)
        if old and (count := _more(old.errors, link.errors)):
            yield Finding(node, now.index, "nvlink", "errors", at, count, message=f"{count} more", place=place)


def _more(before: int | None, now: int | None) -> int:
    """What a counter rose by; one that was cleared, or is new, rose by nothing."""
    return 0 if before is None or now is None else max(0, now - before)


def _narrow(reading: Reading) -> bool:
    return bool(reading.pcie_width and reading.pcie_width_max and reading.pcie_width < reading.pcie_width_max)


def probed(node: str, device: int | None, result: Mapping[str, Any], at: float) -> list[Finding]:
    """The findings of a probe, as `workers.probe` prints them."""
    return [
        Finding(
            node, device, "probe", found["code"], at, float(found["value"] or 0.0),
            message=found["message"], place=found["check"],
        )
        for found in result["findings"]
    ]  # fmt: skip
