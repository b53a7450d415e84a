"""What the API answers besides JobView: the same classes build the answers and read them in the client."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from service.contracts.status import JobView, View


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


class LogLine(View):
    """One line that a rank wrote. `rank` is None where the line tells of the log itself."""

    at: float
    attempt: int
    rank: int | None
    node: str
    stream: Literal["out", "err"]
    text: str


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


class Nodes(View):
    nodes: tuple[NodeView, ...]


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
