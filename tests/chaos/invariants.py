"""What must hold after a storm. Each question answers with sentences of what does not; none: it holds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence

from api.views import StepView
from service.contracts.status import JobView
from tests.chaos.fleet import Fleet
from workers.checkpoint import manifest
from workers.checkpoint.storage import Storage

RELATIVE = 1e-9  # of a loss in float64 after another layout has added in another order
LEAVE_S = 90.0  # that leftovers may take to go: the sweep comes every 30 s
OURS = ("ray::Controller", "ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Titles of processes that a fleet without jobs has."""


def same_run(fleet: Fleet, view: JobView, calm: Mapping[int, float]) -> list[str]:
    """A job that is over did what the same job did in calm."""
    placed = [event for event in fleet.client.events(view.uid) if event.type == "GangPlaced"]
    layouts = dict(enumerate((str(event.data["layout"]) for event in placed), 1))
    samples = len(calm) * int(view.spec["train"]["global_batch"])
    return [*losses(calm, list(fleet.client.metrics(view.uid)), layouts), *ledger(view.storage, samples)]


def losses(calm: Mapping[int, float], steps: Sequence[StepView], layouts: Mapping[int, str]) -> list[str]:
    """Of every step one, bit-equal to the calm run's until the layout first changes. `layouts`: of each attempt."""
    if (told := [row.step for row in steps]) != list(calm):
        missing = sorted(calm.keys() - set(told))
        return [f"{len(told)} steps of {len(calm)} were told; missing are {missing[:5]}"]
    wrong, changed = [], False
    for row in steps:
        changed = changed or layouts[row.attempt] != layouts[min(layouts)]
        found, expected = row.model_dump()["loss"], calm[row.step]
        if not (math.isclose(found, expected, rel_tol=RELATIVE) if changed else found == expected):
            wrong.append(f"step {row.step} of attempt {row.attempt} has loss {found!r}, not {expected!r}")
    return wrong[:3] + ([f"and {len(wrong) - 3} steps more"] if len(wrong) > 3 else [])


def ledger(folder: str, samples: int) -> list[str]:
    """The job's newest checkpoint counts every sample, and each once."""
    storage = Storage.open(folder)
    paths = manifest.published(storage)
    if not paths:
        return [f"{folder} has no checkpoint"]
    entries = manifest.load(storage, paths[0]).header["ledger"]
    starts, ends = [entry["start"] for entry in entries], [entry["end"] for entry in entries]
    whole = starts == [0, *ends[:-1]] and ends[-1:] == [samples]
    return [] if whole else [f"the ledger of {paths[0]} does not run from 0 to {samples}: {entries}"]


def shards(folder: str) -> list[str]:
    """No shard is left of which no manifest knows."""
    storage = Storage.open(folder)
    known = {
        manifest.folder_of(shard.path)
        for path in manifest.published(storage)
        for shard in manifest.load(storage, path).shards
    }
    found = {manifest.folder_of(name) for name in storage.names(manifest.FOLDERS)}
    return [f"{one} is in no manifest" for one in sorted(str(one) for one in found - known)]


def nothing_left(fleet: Fleet, folders: Iterable[str]) -> list[str]:
    """Neither processes nor actors, groups, snapshots and shards of jobs that are over; some time is theirs to go."""
    deadline, known = time.monotonic() + LEAVE_S, list(folders)
    while True:
        fleet.tend()
        left = _left(fleet, known)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def _left(fleet: Fleet, folders: Sequence[str]) -> list[str]:
    processes = [one for one in fleet.processes("ray::") if not one.title.startswith(OURS)]
    if processes:
        return [f"{one.title} runs on {one.host}, pid {one.pid}" for one in processes]
    held = fleet.inventory()
    return [
        *(f"actor {name} is there" for name in held["actors"] if name != "controller"),
        *(f"placement group {name} is there" for name in held["groups"]),
        *(f"snapshots are left in {folder}" for folder in fleet.kept()),
        *(sentence for folder in folders for sentence in shards(folder)),
    ]
