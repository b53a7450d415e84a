"""What the API answers besides JobView: the same classes build the answers and read them in the client."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from service.contracts.status import IncidentView, JobView, RankPlace, View
from service.store.records import Scope
from workers.spec import ParallelLayout


class JobsPage(View):
    """Newest first. `next_page` goes into the query of the next request; None on the last page."""

    jobs: tuple[JobView, ...]
    next_page: str | None


class EventView(View):
    """One line of a job's event log. `id` grows and is the cursor."""

    id: int
    job: str
    at: float
    type: str
    reason: str
    data: dict[str, Any]


class EventsPage(View):
    events: tuple[EventView, ...]
    after: int  # cursor of the next request


Level = Literal["debug", "info", "warning", "error"]  # from weak to strong


class LogLine(View):
    """One line that a rank wrote. `rank` is None where the line tells of the log itself. `level`: as the line says it,
    else info on standard output and warning on standard error.
    """

    at: float
    attempt: int
    rank: int | None
    node: str
    stream: Literal["out", "err"]
    text: str
    level: Level = "info"


class LogsPage(View):
    lines: tuple[LogLine, ...]
    after: str  # cursor of the next request


class StepView(View):
    """The figures of one completed step: loss, grad_norm, tokens, step_s and what else was measured."""

    model_config = ConfigDict(frozen=True, extra="allow")

    step: int
    attempt: int
    at: float


class MetricsPage(View):
    steps: tuple[StepView, ...]
    after_step: int  # cursor of the next request


class RankView(View):
    """Where a rank stands, and its place in the layout: pipeline stage, replica, tensor slice. `parts`: seconds of a
    step on it, by what it did, means over some seconds until `Ranks.at`; ranks wait for each other in most of them.
    `pulse_s`: of a small piece of work that is the same for all.
    """

    rank: int
    node: str
    slot: int
    rack: str
    zone: str
    pp: int
    dp: int
    tp: int
    step_s: float | None = None
    parts: dict[str, float] = Field(default_factory=dict)
    pulse_s: float | None = None


class Ranks(View):
    attempt: int
    step: int | None = None  # the last that `parts` are of
    at: float | None = None
    layout: ParallelLayout | None
    ranks: tuple[RankView, ...]


class FaultView(View):
    kind: str
    message: str
    rank: int | None
    node: str | None
    step: int
    traceback: str


class IncidentDetail(View):
    incident: IncidentView
    faults: tuple[FaultView, ...]  # the root first, then some of its echoes


class Incidents(View):
    """Oldest first."""

    incidents: tuple[IncidentDetail, ...]


class GoodputView(View):
    """Where a job's seconds went; all but `goodput` and `elapsed_s` add up to `elapsed_s`. productive_s: each step's
    own time, once; redone_s: of steps that were done before; detect_s: from the last progress to knowing of a fault;
    place_s: without slots; between_s: between the steps of a gang at work.
    """

    goodput: float
    elapsed_s: float
    productive_s: float = 0.0
    redone_s: float = 0.0
    detect_s: float = 0.0
    stop_s: float = 0.0
    place_s: float = 0.0
    start_s: float = 0.0
    load_s: float = 0.0
    first_step_s: float = 0.0
    suspended_s: float = 0.0
    between_s: float = 0.0


class CheckpointView(View):
    step: int
    attempt: int
    manifest: str
    published_at: float
    rejected: str | None  # why it is never used again: it failed its verification, or was undone
    nbytes: int | None = None
    verified_at: float | None = None  # when every byte of it was last read and was right
    stored: bool | None = None  # False: retention has removed it; None: storage could not be asked

    @property
    def good(self) -> bool:
        return self.rejected is None and self.stored is not False


class Checkpoints(View):
    """Newest first."""

    checkpoints: tuple[CheckpointView, ...]


class ManifestView(View):
    """What the manifest of a checkpoint says; its digest was right when it was read."""

    checkpoint: CheckpointView
    job: str
    created_at: float
    layout: dict[str, Any]
    model: dict[str, Any]
    shards: int
    nbytes: int
    tensors: int  # of the optimizer too
    elements: int
    parameters: int  # elements of the model's tensors
    samples: int | None
    ledger: list[dict[str, Any]]  # which attempt consumed which samples
    optimizer: dict[str, Any]


class Rescaled(View):
    """What a wish for another size comes to as the fleet is now."""

    uid: str
    slots: int
    layout: ParallelLayout | None  # None: there is no room now; the job goes on as it is until there is
    possible: bool
    reason: str
    asked: bool  # False: it was a dry run


class Asked(View):
    """Something is done about a checkpoint. The answer is an event of the job, after the event `after`."""

    kind: Literal["verify", "export"]
    checkpoint: CheckpointView
    after: int
    to: str | None = None

    def answered_by(self, event: EventView) -> bool:
        said = event.data.get("manifest"), event.data.get("to")
        return event.type in ANSWERS[self.kind] and said == (self.checkpoint.manifest, self.to)


ANSWERS = {
    "verify": ("CheckpointVerified", "CheckpointRejected", "CheckpointCheckFailed"),
    "export": ("CheckpointExported", "CheckpointExportFailed"),
}


class NodeView(View):
    """One node as the controller last saw it."""

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
    draining: float | None = None  # Unix seconds at which it goes: notice was given
    barred: str | None = None  # why nothing is placed on it now


class Nodes(View):
    nodes: tuple[NodeView, ...]


class RankMemory(View):
    """Bytes on a device of one pipeline rank, as the cost model estimates them."""

    rank: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    overhead: float  # context, allocator, communicators
    total: float


class SnapshotView(View):
    every_steps: int  # 0: none are taken
    gpu_bytes: float  # of the fullest device
    node_bytes: float  # of one copy; two generations of two copies are kept
    copy_s: float  # that the ranks wait
    share: float  # of the time


class EstimateView(View):
    """What the cost model says of a layout. `parts` are seconds of a mean rank that sum to `step_s`."""

    accelerator: str
    step_s: float
    parts: dict[str, float]
    bubble: float
    mfu: float
    tokens_per_s: float
    tokens: float  # that the next two are for
    days: float
    gpu_hours: float
    device_bytes: float
    usable_bytes: float
    fits: bool
    memory: tuple[RankMemory, ...]  # by pipeline rank
    snapshot: SnapshotView


class AlternativeView(View):
    """Another layout: `ratio` is its step time over the plan's."""

    layout: ParallelLayout
    described: str
    step_s: float
    mfu: float
    memory_bytes: float
    ratio: float
    why: str


class MapView(View):
    """Where ranks stand: a rack, or racks that follow each other and are alike."""

    racks: str
    nodes: str
    slots: int
    held: tuple[str, ...]
    text: str


class PlanView(View):
    """`estimate` is none, and `others` empty, where no figures are known of the devices. `others` are the next best of
    a layout that was chosen; of one that the job names, they are what would have been chosen, and the next best.
    """

    job: str
    slots: int
    layout: ParallelLayout
    described: str
    chosen: bool  # by the planner
    reason: str
    estimate: EstimateView | None
    others: tuple[AlternativeView, ...]
    map: tuple[MapView, ...]


class QueueView(View):
    name: str
    priority: int  # jobs of a queue of a higher one come first
    created_at: float


class Queues(View):
    """What comes first is first."""

    queues: tuple[QueueView, ...]


class ProjectView(View):
    name: str
    slots: int | None  # that its jobs may hold together; None: no bound
    created_at: float


class Projects(View):
    """By name."""

    projects: tuple[ProjectView, ...]


class TokenView(View):
    id: str
    name: str
    project: str | None  # None: all of them
    scope: Scope
    created_at: float
    expires_at: float | None
    revoked_at: float | None


class Tokens(View):
    """Oldest first."""

    tokens: tuple[TokenView, ...]


class MadeToken(TokenView):
    token: str  # told this once


class UsageView(View):
    """What the jobs of a project in a queue have used together; `goodput`: useful time over the time that they took;
    `lost_slot_hours`: of incidents, by their cause, and of planned moves."""

    project: str
    queue: str
    jobs: int
    slot_hours: float
    lost_slot_hours: dict[str, float]
    tokens: float
    goodput: float
    cost: float | None  # at the price that was given


class Usage(View):
    entries: tuple[UsageView, ...]


class HookView(View):
    id: str
    url: str
    secret: str  # where it is found
    project: str | None  # None: all of them
    types: tuple[str, ...]
    created_at: float
    after: int  # the last event that it was told of
    failures: int  # in a row
    failing_since: float | None
    error: str


class Hooks(View):
    """Oldest first."""

    hooks: tuple[HookView, ...]


class AuditView(View):
    """A request that was to change something, and how it was answered."""

    id: int
    at: float
    who: str
    project: str | None
    action: str
    target: str
    status: int


class AuditPage(View):
    """Oldest first. `after` goes into the query of the next request."""

    entries: tuple[AuditView, ...]
    after: int


class Trial(View):
    """What a job would come to if it were submitted now; it was not."""

    starts: bool  # False: it would wait
    reason: str
    layout: ParallelLayout | None
    placement: tuple[RankPlace, ...]
    plan: PlanView | None  # none where no node was seen yet


class Health(View):
    status: Literal["ok"] = "ok"


class Problem(View):
    """RFC 9457, with `reason` (published code), `hint` (what would work) and `field` (the input at fault)."""

    type: str
    title: str
    status: int
    detail: str
    reason: str
    hint: str = ""
    field: str = ""
