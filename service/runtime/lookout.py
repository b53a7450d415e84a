"""The fleet as Ray has it, less the nodes that are known to be gone sooner than Ray knows.

Ray asks a silent node several times before it gives it up. But a raylet that has ended refuses connections at once:
when something broke, every node is knocked at. A refusal counts where the door was open before, for nobody else
answers there; a host that is silent is left to Ray, for it may be slow, or behind a broken link.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray._private.state import state

from service.contracts.cluster import Fleet
from service.runtime import watcher

log = logging.getLogger("phalanx.lookout")

WATCH_S = 0.5
DOUBT_S = 0.1  # between two close looks
KNOCK_S = 1.0
AT_ONCE = 32

Row = Mapping[str, Any]  # of Ray's node table


class Lookout:
    def __init__(self) -> None:
        self.doubt = threading.Event()
        """Something broke: look now, and closely."""
        self.open: set[str] = set()  # ids of nodes whose raylet was there
        self.ended: set[str] = set()  # and is not any more; an id never comes back

    def watch(self, known: Fleet, tell: Callable[[Fleet], None], over: threading.Event) -> None:
        """Tell of changes until it is over. In a thread of its own: while the head is down, there is no table."""
        while not over.wait(DOUBT_S):
            self.doubt.wait(WATCH_S)
            try:
                fleet = self.fleet()
            except Exception as error:
                log.warning("Ray's node table could not be read: %s", error)
                continue
            if fleet != known:
                known = fleet
                tell(fleet)

    def fleet(self) -> Fleet:
        """As of now. Raises what Ray does where its table can't be read."""
        rows = [row for row in ray.nodes() if row["Alive"]]
        doubted = self.doubt.is_set()
        self.doubt.clear()
        self.knock(rows if doubted else [row for row in rows if row["NodeID"] not in self.open])
        left = [row for row in rows if row["NodeID"] not in self.ended]
        return watcher.of(left, state.get_draining_nodes())

    def knock(self, rows: Iterable[Row]) -> None:
        doors = {row["NodeID"]: (row["NodeManagerAddress"], row["NodeManagerPort"]) for row in rows}
        doors = {node: door for node, door in doors.items() if node not in self.ended}
        if not doors:
            return
        with ThreadPoolExecutor(min(AT_ONCE, len(doors)), thread_name_prefix="knock") as pool:
            answers = dict(zip(doors, pool.map(_opens, doors.values()), strict=True))
        self.ended |= {node for node, answer in answers.items() if answer is False} & self.open
        self.open |= {node for node, answer in answers.items() if answer}


def _opens(door: tuple[str, int]) -> bool | None:
    """None: no telling."""
    try:
        socket.create_connection(door, KNOCK_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True
