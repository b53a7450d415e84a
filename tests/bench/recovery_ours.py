"""The training as a job of a local fleet: four nodes of two slots and a spare one, standbys, a snapshot every step."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from api.client import Client
from service.contracts.status import IncidentView
from service.local import LocalFleet
from tests.bench.recovery_fault import JOB, VICTIM, Done, Fault, until
from tests.e2e.world import World

SPEC = {
    **JOB,
    "resources": {"device": "cpu", "slots": 8, "spares": 1},
    "checkpoint": {**JOB["checkpoint"], "snapshot_every": 1},
}
SLOTS = 2
NODES = {f"n{number}": (f"r{number // 2}", f"127.0.77.{number + 2}") for number in range(5)}
"""Rack and address of each node; the last one is to spare."""
SPARE = "n4"
PARTS = ("detect_s", "stop_s", "place_s", "start_s", "load_s", "first_step_s")
"""Of an incident: detection counts from the last progress that was heard of."""


class Ours:
    def __init__(self, world: World) -> None:
        self.world = world
        self.whole()
        self.uid = world.client.submit(SPEC).uid
        self.heard: list[Done] = []
        self.lost = ""

    def steps(self) -> Sequence[Done]:
        furthest = self.heard[-1].step if self.heard else 0
        new = self.world.client.metrics(self.uid, after_step=furthest)
        self.heard += [Done(row.step, row.attempt, row.at) for row in new]
        return self.heard

    def mend(self) -> None:
        if self.lost:
            self.world.fleet.join(self.lost, *NODES[self.lost])
            self.lost = ""
        self.whole()
        until(self.warm, "standbys that are warm")

    def whole(self) -> None:
        until(lambda: {node.name for node in self.world.client.nodes()} == set(NODES), "fleet of five nodes")

    def warm(self) -> bool:
        """A warm process stands behind every rank, and on every slot of a spare node."""
        status = self.world.client.get(self.uid).status
        return len(status.spares) == 1 and status.standbys == SLOTS * len(NODES)

    def kill(self, fault: Fault) -> None:
        view = self.world.client.get(self.uid)
        if fault == "rank":
            os.kill(self.world.pids(self.uid, view.status.attempt, VICTIM)[0], signal.SIGKILL)
        else:
            self.lost = next(place.node for place in view.status.placement if place.rank == VICTIM)
            self.world.fleet.lose(self.lost)

    def redone(self, broken: int) -> int:
        return sum(one.steps_redone or 0 for one in self.incidents(broken))

    def parts(self, broken: int) -> Mapping[str, float]:
        found = self.incidents(broken)
        return {part: sum(getattr(one, part) for one in found) for part in PARTS}

    def incidents(self, broken: int) -> list[IncidentView]:
        def over() -> list[IncidentView]:
            found = [one for one in self.world.client.get(self.uid).status.incidents if one.attempt >= broken]
            return found if all(one.recover_s is not None for one in found) else []

        return until(over, "end of the incident")


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Ours]:
    fleet = LocalFleet(folder / "home", api_port=0)
    fleet.start()
    try:
        fleet.join(SPARE, *NODES[SPARE])
        with Client.find(fleet.home) as client:
            yield Ours(World(client, fleet))
    finally:
        fleet.stop()
