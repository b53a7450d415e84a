"""The network of this node: its Ethernet and InfiniBand ports, as the kernel shows them below /sys/class. No policy.

net/<name>/operstate and carrier_down_count, statistics/rx_errors and tx_errors (Documentation/ABI/testing/
sysfs-class-net); infiniband/<device>/ports/<n>/state ("4: ACTIVE") and counters (Documentation/ABI/stable/
sysfs-class-infiniband). Interfaces without a device behind them (bridges, tunnels, containers' ends) come and go by
design and are left out, and so is a port that was never up: it has no cable.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from service.core.policy import Finding

SYS = Path("/sys/class")

NET_ERRORS = ("rx_errors", "tx_errors")
INFINIBAND_ERRORS = (
    "symbol_error", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    name: str
    up: bool
    downs: int  # times that its link went, since the machine started
    errors: int


class Ports:
    """A source: ports whose link is gone, as long as it is, was gone between two looks, or has errors."""

    def __init__(self, node: str, root: Path = SYS) -> None:
        self.node, self.root = node, root
        self.last = read(root)
        self.wired = {port.name for port in self.last.values() if port.up}

    def look(self, at: float) -> list[Finding]:
        before, self.last = self.last, read(self.root)
        self.wired |= {port.name for port in self.last.values() if port.up}
        return [finding for name in sorted(self.wired) for finding in self._of(name, before.get(name), at)]

    def _of(self, name: str, before: Port | None, at: float) -> Iterator[Finding]:
        now = self.last.get(name)
        if now is None or not now.up:
            message = "it is gone" if now is None else "no link"
            yield Finding(self.node, None, "port", "down", at, message=message, place=name)
        elif before and before.up and now.downs > before.downs:
            yield Finding(self.node, None, "port", "flap", at, now.downs - before.downs, place=name)
        if now and before and (count := now.errors - before.errors) > 0:
            yield Finding(self.node, None, "port", "errors", at, count, message=f"{count} more", place=name)


def read(root: Path = SYS) -> dict[str, Port]:
    """Ports by name: an interface's, or `device/port` of InfiniBand."""
    interfaces = [folder for folder in _folders(root / "net") if (folder / "device").exists()]
    cards = [port for card in _folders(root / "infiniband") for port in _folders(card / "ports")]
    ports = [*map(_interface, interfaces), *map(_infiniband, cards)]
    return {port.name: port for port in ports}


def _interface(folder: Path) -> Port:
    errors = sum(_number(folder / "statistics" / name) for name in NET_ERRORS)
    return Port(folder.name, _text(folder / "operstate") == "up", _number(folder / "carrier_down_count"), errors)


def _infiniband(folder: Path) -> Port:
    errors = sum(_number(folder / "counters" / name) for name in INFINIBAND_ERRORS)
    name = f"{folder.parent.parent.name}/{folder.name}"
    return Port(name, _text(folder / "state").startswith("4:"), _number(folder / "counters" / "link_downed"), errors)


def _folders(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(child for child in folder.iterdir() if child.is_dir())
    return []


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):  # a port that is just going, or a counter that this driver lacks
        return path.read_text().strip()
    return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else 0
