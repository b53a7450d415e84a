"""Rows as the rest of the service sees them: frozen values. Knows nothing of SQL. Times are Unix seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

Scope = Literal["read", "submit", "admin"]  # each may what the one before may

IntentKind = Literal[
    "cancel", "restore", "rescale", "suspend", "resume", "save", "restart", "change", "verify", "export"
]

Document = Mapping[str, Any]
"""What is kept as JSON. A number that is not finite comes back as None: JSON has no word for it."""

NewEvent = tuple[str, float, str, str, Document]
"""(job, at, type, reason, data) of an event that has no id yet."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobRow:
    uid: str
    seq: int  # order of submission
    name: str
    phase: str
    reason: str
    spec: dict[str, Any]
    status: dict[str, Any]
    created_at: float
    updated_at: float
    ended_at: float | None
    cancel_requested: bool
    project: str = "default"
    desired: str = "running"  # or suspended
    generation: int = 1  # of the spec


@dataclasses.dataclass(frozen=True, slots=True)
class QueueRow:
    name: str
    priority: int  # what is higher comes first
    created_at: float


@dataclasses.dataclass(frozen=True, slots=True)
class ProjectRow:
    name: str
    slots: int | None  # that its jobs may hold together; None: no bound
    created_at: float


@dataclasses.dataclass(frozen=True, slots=True)
class UsageRow:
    """What the jobs of a project in a queue have used together."""

    project: str
    queue: str
    jobs: int
    slot_s: float
    tokens: float
    productive_s: float
    elapsed_s: float  # from their submission to their end, or to now
    lost_slot_s: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by cause


@dataclasses.dataclass(frozen=True, slots=True)
class HookRow:
    """Who is told of events of these types, of one project or of all."""

    id: str
    url: str
    secret: str  # where it is found: env:NAME or file:PATH
    project: str | None
    types: Sequence[str]
    created_at: float
    after: int = 0  # the last event that it was told of
    failures: int = 0  # in a row
    failing_since: float | None = None
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRow:
    """Who may do what: never the secret itself."""

    id: str
    name: str
    project: str | None  # None: in all projects
    scope: Scope
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Audit:
    """A request that was to change something, and how it was answered."""

    id: int
    at: float
    who: str  # the token's id, or the subject that an issuer named
    project: str | None
    action: str  # method and route
    target: str  # path
    status: int


@dataclasses.dataclass(frozen=True, slots=True)
class Which:
    """Jobs that are looked for: all of what is said must hold."""

    phases: Collection[str] = ()  # any of these
    name: str = ""  # as a whole, or with * at its end how it begins
    labels: Mapping[str, str | None] = dataclasses.field(default_factory=dict)  # None: whatever its value
    project: str | None = None  # None: of all


@dataclasses.dataclass(frozen=True, slots=True)
class EventRow:
    id: int  # grows over the whole store in the order of commits: a cursor
    job: str
    at: float
    type: str
    reason: str
    data: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class MetricRow:
    """One step of a job. A step that is done again, by the same attempt or a later one, replaces the row.

    With `beside`, more figures of a step that its attempt has done: they join its row, and without one are dropped.
    With `recalled`, figures that may be there already, and then say nothing new.
    """

    job: str
    step: int
    attempt: int
    at: float
    values: Document
    beside: bool = False
    recalled: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class TimesRow:
    """How long the parts of a step took each rank in the window that ended `at`."""

    job: str
    at: float
    attempt: int
    step: int  # the last
    parts: Mapping[str, Sequence[float | None]]  # seconds by rank; None of one that said nothing


@dataclasses.dataclass(frozen=True, slots=True)
class LogChunk:
    """A piece of a node's log, in storage but not yet in the store. `path` is relative to {root}/{job}."""

    job: str
    attempt: int
    node: str
    path: str
    lines: int
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class LogChunkRow:
    id: int  # orders all chunks as they were committed: a cursor
    job: str
    attempt: int
    node: str
    path: str
    lines: int
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointRow:
    job: str
    step: int
    attempt: int
    manifest: str
    published_at: float
    rejected: str | None = None  # why it is never to be loaded again
    nbytes: int | None = None
    verified_at: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRow:
    id: str
    name: str
    slots: int
    rack: str
    zone: str
    device: str
    address: str
    seen_at: float
    nvlink: str = ""
    accelerator: str = ""
    draining: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Intent:
    """What a user wants done to a job and the controller has not yet handled."""

    id: int
    job: str
    kind: IntentKind
    at: float
    data: Document = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class JobUpdate:
    uid: str
    phase: str
    reason: str
    status: Document
    core: Document  # the core's own state of the job, for the next controller
    ended_at: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """What one turn of the controller writes, all or nothing."""

    jobs: Sequence[JobUpdate] = ()
    events: Sequence[NewEvent] = ()
    metrics: Sequence[MetricRow] = ()
    times: Sequence[TimesRow] = ()
    log_chunks: Sequence[LogChunk | LogChunkRow] = ()  # the id of a LogChunkRow is passed over
    checkpoints: Sequence[CheckpointRow] = ()
    intents_done: Sequence[int] = ()
    nodes: Sequence[NodeRow] | None = None  # None: unchanged; else these replace all
    health: Mapping[str, Document] | None = None  # of nodes by name; None: unchanged; else these replace all
    forgiven: Sequence[str] = ()  # nodes, as somebody wished
