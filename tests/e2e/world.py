"""What the tests of the whole do: submit small jobs over REST, wait on conditions with deadlines, break things."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

from api.client import Client
from service.contracts.job import Phase
from service.contracts.status import JobView
from service.local import LocalFleet

T = TypeVar("T")

PATIENT_S = 180.0  # a machine that has something else to do takes four times as long

JOB: dict[str, Any] = {
    "name": "small",
    "model": {"layers": 4, "hidden": 32, "heads": 8, "kv_heads": 2, "ffn_hidden": 48, "seq_len": 32},
    "data": {},
    "train": {"steps": 32, "global_batch": 8, "learning_rate": 1e-2, "precision": "fp32", "seed": 3},
    "parallel": {"dp": 2, "pp": 2, "tp": 2},
    "resources": {"device": "cpu", "slots": 8, "standbys": False},  # processes that start take cores from steps
    "checkpoint": {"every_steps": 8},
}


HALF: dict[str, Any] = {"parallel": {"dp": 1}, "resources": {"slots": 4}}
"""Changes that make it a job of one replica: four ranks start in half the time."""


def until(condition: Callable[[], T], what: str, timeout_s: float = PATIENT_S) -> T:
    """The first true value of `condition`; AssertionError at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"no {what} in {timeout_s:.0f} s"
        time.sleep(0.1)
    return value


class World:
    def __init__(self, client: Client, fleet: LocalFleet) -> None:
        self.client, self.fleet = client, fleet
        self.jobs: list[str] = []

    def submit(self, **changes: Any) -> str:
        """A small job; a mapping changes single fields of a section."""
        spec = {**JOB, **{k: {**JOB.get(k, {}), **v} if isinstance(v, dict) else v for k, v in changes.items()}}
        uid = self.client.submit(spec).uid
        self.jobs.append(uid)
        return uid

    def reach(self, uid: str, step: int) -> JobView:
        """The job once it has completed `step`."""

        def there() -> JobView | None:
            view = self.client.get(uid)
            assert not view.phase.terminal or view.status.progress.step >= step, view.reason
            return view if view.status.progress.step >= step else None

        return until(there, f"step {step} of {uid}")

    def saved(self, uid: str, step: int) -> int:
        """The step of the job's newest checkpoint, once it is `step` or later."""

        def there() -> int:
            newest = self.client.get(uid).status.checkpoint_step or 0
            return newest if newest >= step else 0

        return until(there, f"checkpoint {step} of {uid}")

    def phase(self, uid: str, *phases: Phase) -> JobView:
        def there() -> JobView | None:
            view = self.client.get(uid)
            assert view.phase in phases or not view.phase.terminal, f"{view.phase}: {view.reason}"
            return view if view.phase in phases else None

        return until(there, f"{uid} in {phases}")

    def ended(self, uid: str) -> JobView:
        """The job once it has failed."""
        return self.phase(uid, Phase.FAILED)

    def finish(self, uid: str) -> JobView:
        return self.phase(uid, Phase.SUCCEEDED)

    def losses(self, uid: str) -> dict[int, float]:
        return {step.step: step.model_dump()["loss"] for step in self.client.metrics(uid)}

    def events(self, uid: str) -> list[str]:
        return [event.type for event in self.client.events(uid)]

    def pids(self, uid: str, attempt: int, rank: int | None = None) -> list[int]:
        """Of the ranks of an attempt, as they told their logs."""

        def told() -> list[int]:
            lines = [line.text for line in self.client.logs(uid, rank=rank, attempt=attempt)]
            return [int(found[1]) for line in lines if (found := re.search(r"pid (\d+)$", line))]

        return until(told, f"pid of rank {rank} in the logs")

    def kill(self, uid: str, attempt: int, rank: int, after: int = 0) -> None:
        """SIGKILL to a rank once the job has completed step `after`."""
        (pid,) = self.pids(uid, attempt, rank)
        self.reach(uid, after)
        os.kill(pid, signal.SIGKILL)

    def processes(self, title: str) -> list[psutil.Process]:
        """Processes of the fleet with this title: `ray::Rank`, `ray::NodeAgent`, `ray::Controller`."""
        family = psutil.Process().children(recursive=True)
        return [one for one in family if _title(one).startswith(title)]

    def clear(self) -> None:
        for uid in self.jobs:
            if not self.client.get(uid).phase.terminal:
                self.client.cancel(uid)
        for uid in self.jobs:
            until(lambda uid=uid: self.client.get(uid).phase.terminal, f"end of {uid}")  # type: ignore[misc]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
