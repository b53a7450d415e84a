"""Asks Ray's autoscaler, where the cluster has one, for the nodes that jobs wait for; and for no more than they need.

A placement group is only asked for once its node is there, so the autoscaler would never see what is waited for. Ray
keeps the newest request until another one takes its place; without an autoscaler nobody reads it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import ray
from ray.autoscaler.sdk import request_resources

from service.core import demand
from service.core.demand import Bundle
from service.core.state import State

log = logging.getLogger("phalanx.growth")

AGAIN_S = 60.0  # a head that came back without its memory does not know of it

Wanted = Counter[Bundle]


def request(wanted: Wanted) -> None:
    """RayError, ValueError or ConnectionError where the head can't be asked."""
    request_resources(bundles=[_resources(bundle) for bundle in wanted.elements()])


class Growth:
    def __init__(self, ask: Callable[[Wanted], None] = request) -> None:
        self.ask = ask
        self.asked: Wanted | None = None
        self.at = 0.0
        self.busy = False
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="growth")

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    def look(self, state: State) -> None:
        """Ask for what is wanted now, where that is news or the last time is long ago. Never waits."""
        wanted = demand.of(state)
        if self.busy or (wanted == self.asked and time.monotonic() - self.at < AGAIN_S):
            return
        self.busy = True
        self.pool.submit(self._ask, wanted)

    def _ask(self, wanted: Wanted) -> None:
        try:
            self.ask(wanted)
            if wanted != self.asked:
                log.info("the cluster is to have %s", _sentence(wanted))
            self.asked, self.at = wanted, time.monotonic()
        except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
            log.warning("the autoscaler could not be asked: %s", error)
        finally:
            self.busy = False


def _resources(bundle: Bundle) -> dict[str, int]:
    device, slots = bundle
    return {"GPU": slots, "CPU": 1} if device == "gpu" else {"CPU": slots}


def _sentence(wanted: Wanted) -> str:
    parts = [f"{count} times {slots} {device} slots" for (device, slots), count in sorted(wanted.items())]
    return ", ".join(parts) or "no slots"
