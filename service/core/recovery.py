"""Whether and when a broken attempt is followed by another, and what it is charged to. Knows no slots.

One fault breaks many ranks within milliseconds: a lost node kills processes, and their peers see broken
sockets. Of all evidence of one moment the root is judged, not its echoes. Each cause has its own budget
within a window; the same root at the same step three times, with no new step in between, is no progress, whatever
the budget has left. Once the state that the attempt continued with is to blame, and an older one is tried.

A loss that is no number comes again where the same samples make it: the user's, tried again because a device may
have erred, and no progress soon. Copies that drift apart are a device's error; the newest checkpoint, which holds
one copy, makes them equal again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from service.contracts.events import Fault, FaultKind
from service.contracts.job import Cause
from service.core.state import Job

Charges = tuple[tuple[Cause, float], ...]

WINDOW_S = 3600.0
BACKOFF_MAX_S = 60.0
SAME_ROOT_LIMIT = 3

ROOTS: tuple[FaultKind, ...] = (
    "preempted", "node_lost", "out_of_memory", "device", "process_died", "gang_lost",
    "hang", "start_failed", "corruption", "drift", "numeric", "storage", "code", "user", "peer"
)  # fmt: skip
"""From root to echo. A rank whose peer died may raise anything: process_died is before user."""

CAUSES: dict[FaultKind, Cause] = {
    "preempted": Cause.PREEMPTION,
    "node_lost": Cause.INFRASTRUCTURE,
    "out_of_memory": Cause.INFRASTRUCTURE,
    "device": Cause.INFRASTRUCTURE,
    "process_died": Cause.INFRASTRUCTURE,
    "gang_lost": Cause.INFRASTRUCTURE,
    "start_failed": Cause.INFRASTRUCTURE,
    "storage": Cause.INFRASTRUCTURE,
    "peer": Cause.INFRASTRUCTURE,
    "drift": Cause.INFRASTRUCTURE,
    "corruption": Cause.INFRASTRUCTURE,
    "hang": Cause.HANG,
    "numeric": Cause.USER_ERROR,
    "code": Cause.USER_ERROR,
    "user": Cause.USER_ERROR,
}

LASTING: frozenset[FaultKind] = frozenset({"code"})
"""The same at every try: own code that can't be loaded."""

FIGURES: frozenset[FaultKind] = frozenset({"numeric", "drift", "corruption", "out_of_memory"})
"""Their messages tell figures and places, which may differ though the fault is the same."""

PASSING: frozenset[FaultKind] = frozenset({"storage", "node_lost", "gang_lost", "preempted"})
"""They say nothing of the step at which they came, and are waited for within their budgets."""

SILENT: frozenset[FaultKind] = frozenset({"node_lost", "gang_lost", "hang", "start_failed", "preempted"})
"""Nobody tells these when they happen; they are noticed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    restart: bool
    cause: Cause
    root: Fault
    not_before: float  # of the next attempt
    reason: str
    quarantine: bool = False  # the state that the attempt continued with is not tried again


def blame(faults: Sequence[Fault]) -> Fault:
    """The root among its echoes; of equals the first."""
    return min(faults, key=lambda fault: ROOTS.index(fault.kind))


def cause_of(fault: Fault) -> Cause:
    return CAUSES[fault.kind]


def judge(job: Job, faults: Sequence[Fault], at: float) -> Verdict:
    """The verdict on the attempt that `faults` broke at `at`, this fault's charge included."""
    root = blame(faults)
    cause = cause_of(root)
    budget = job.spec.budgets.of(cause)
    spent = 1 + sum(charged is cause for charged, _ in _recent(job.charges, at))
    same = 1 + _known(job).count(_key(root, job.step))
    what = _sentence(root, job)
    if root.kind in LASTING:
        return Verdict(False, cause, root, at, f"{what}; another try would end the same")
    stuck = same >= SAME_ROOT_LIMIT and root.kind not in PASSING
    older = stuck and not job.quarantined and bool(job.resumed_step)
    if stuck and not older:
        return Verdict(False, cause, root, at, f"no_progress: {same} times at the same step: {what}")
    if 0 <= budget < spent:
        reason = f"{what}; {cause} fault {spent} within an hour, the budget is {budget}"
        return Verdict(False, cause, root, at, reason)
    wait = backoff(cause, sum(old.recover_s is None and old.cause is not None for old in job.incidents))
    when = f"after {wait:g} s" if wait else "at once"
    bound = f"of {budget} " if budget >= 0 else ""
    passed = f" {same} times at the same step; passes over the state of step {job.resumed_step};" if older else ""
    reason = f"{what};{passed} restarts {when}, {cause} fault {spent} {bound}within an hour"
    return Verdict(True, cause, root, at + wait, reason, older)


def backoff(cause: Cause, before: int) -> float:
    """Seconds to wait after `before` other faults since the last new step. The user's first is not free."""
    if cause is Cause.USER_ERROR:
        before += 1
    return min(BACKOFF_MAX_S, 2.0 ** min(before - 1, 10)) if before else 0.0


def charge(charges: Charges, cause: Cause, at: float) -> Charges:
    """The charges with one more, and without those that no longer count."""
    return (*_recent(charges, at), (cause, at))


def faulted_at(root: Fault, progress_at: float, at: float) -> float:
    """When it happened. A silent fault is dated as early as it may have been: no recovery is flattered."""
    return min(progress_at, at) if root.kind in SILENT else at


def first_line(message: str) -> str:
    return next(iter(message.strip().splitlines()), "")[:200]


def _recent(charges: Charges, at: float) -> Charges:
    return tuple(entry for entry in charges if at - entry[1] < WINDOW_S)


def _known(job: Job) -> list[tuple[str, str, int]]:
    """Of the faults since the last new step."""
    since = (incident for incident in job.incidents if incident.faults and incident.recover_s is None)
    return [_key(blame(incident.faults), incident.step) for incident in since]


def _key(root: Fault, step: int) -> tuple[str, str, int]:
    """What makes two faults the same. The rank knows its step best; the core's count may lag."""
    return root.kind, "" if root.kind in FIGURES else first_line(root.message), root.step or step


def _sentence(root: Fault, job: Job) -> str:
    rank = f" on rank {root.rank}" if root.rank is not None else ""
    node = f" on {root.node}" if root.node else ""
    message = first_line(root.message)
    return f"{root.kind}{rank}{node} after step {job.step}" + (f": {message}" if message else "")
