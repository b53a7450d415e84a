"""How long each phase of a recovery takes: given, or measured from incidents. In seconds.

The defaults are what `tests/bench/recovery.py` measured on two cores with eight ranks on gloo, rounded up: detection,
stopping, and swapping standbys in happen on all nodes at once, and don't grow with them. What does grow is scaled:

- `connect_rank_s`: making the communicators of a large job takes a time of its own, which no run here has shown.
  MegaScale (NSDI 2024, section 3.5) has it at less than 5 s on 2,048 GPUs and less than 30 s on more than 10,000:
  3 ms a rank.
- `load_memory_s`: half a second was measured, of next to no state. Llama 3 405B has 16 bytes a parameter, 3.2 GB a node
  of eight of 16,384 GPUs: at 2 GB/s, which a core verifies, 1.6 s.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from service.contracts.errors import UserError
from service.contracts.status import IncidentView, JobView
from service.core import recovery

STANDBY_START_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Phases:
    detect_process_s: float = 0.5  # from a process's end to knowing
    detect_node_s: float = 1.0  # of one that ends; Ray gives up a silent one after 15 s, or as it is set
    stop_s: float = 0.5  # until every process of the attempt is gone
    start_s: float = 19.5  # until every rank has its process and its assignment; with standbys 1
    connect_rank_s: float = 0.003  # of making communicators, a rank of the job
    load_memory_s: float = 2.0  # state from the memory of nodes
    load_storage_s: float = 60.0  # from the newest checkpoint, or from the seed

    def with_standbys(self) -> Phases:
        return dataclasses.replace(self, start_s=STANDBY_START_S)

    def load_s(self, ranks: int, from_memory: bool) -> float:
        """From processes to the first step's begin."""
        return ranks * self.connect_rank_s + (self.load_memory_s if from_memory else self.load_storage_s)


def changed(phases: Phases, changes: Sequence[str]) -> Phases:
    """With `name=seconds` put in."""
    for change in changes:
        name, _, text = change.partition("=")
        if name not in names():
            raise UserError(f"there is no phase {name!r}", hint=f"phases are {', '.join(names())}")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e9:
            raise UserError(f"{change}: seconds, 0 or more, were expected", hint=f"write it as {name}=5")
        phases = dataclasses.replace(phases, **{name: value})
    return phases


def names() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(Phases))


def measured(document: Any, assumed: Phases) -> Phases:
    """Of a job that had faults, as `phalanx get -o json` tells it; medians. What it does not show stays as assumed.

    Detection counts from the last completed step, half a step before the fault in the mean. All between knowing and
    the first step's begin is one phase here, `start_s`: stopping, connecting and loading were in what was measured.
    """
    try:
        view = JobView.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"not a job with incidents: {where}: {first['msg']}", hint="phalanx get JOB -o json") from None
    over = [one for one in view.status.incidents if one.recover_s is not None]
    if not over:
        raise UserError(f"job {view.uid} has no incident that is over", hint="name a job that recovered from a fault")
    step_s = view.status.productive_s / max(1, view.status.progress.step)
    processes = [_detected(one, step_s) for one in over if one.cause and one.kind not in recovery.SILENT]
    nodes = [_detected(one, step_s) for one in over if one.kind == "node_lost"]
    return dataclasses.replace(
        assumed,
        detect_process_s=_median(processes, assumed.detect_process_s),
        detect_node_s=_median(nodes, assumed.detect_node_s),
        stop_s=0.0,
        start_s=_median([_restarted(one, step_s) for one in over], 0.0),
        connect_rank_s=0.0,
        load_memory_s=0.0,
        load_storage_s=0.0,
    )


def _detected(incident: IncidentView, step_s: float) -> float:
    return max(0.0, incident.detect_s - step_s / 2)


def _restarted(incident: IncidentView, step_s: float) -> float:
    """From knowing to the first step's begin; a silent fault's recovery counts from the last progress."""
    assert incident.recover_s is not None
    since = incident.recover_s - (incident.detect_s if incident.kind in recovery.SILENT else 0.0)
    return max(0.0, since - step_s * ((incident.steps_redone or 0) + 1))


def _median(values: Sequence[float], otherwise: float) -> float:
    return statistics.median(values) if values else otherwise
