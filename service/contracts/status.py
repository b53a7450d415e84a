"""What is told of a job: the same values in REST answers, the command line and the dashboard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.contracts.job import Cause, Phase
from workers.spec import ParallelLayout


class View(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RankPlace(View):
    rank: int
    node: str  # name
    slot: int  # device index on its node


class IncidentView(View):
    """A fault, or a planned move, whose cause is null. Seconds: detect_s from the last progress to knowing; recover_s
    from the fault to the first new completed step. In between: stop_s, until every rank is gone; place_s, without
    slots; suspended_s, by request; start_s, until each rank has its process; load_s, of its state; first_step_s, until
    the first step begins.
    """

    number: int
    attempt: int
    cause: Cause | None
    kind: str
    message: str
    rank: int | None
    node: str | None
    step: int
    faulted_at: float
    detect_s: float
    recover_s: float | None
    steps_redone: int | None
    action: str
    layout_before: ParallelLayout | None = None
    layout_after: ParallelLayout | None = None
    tier: Literal["memory", "storage", "seed"] | None = None  # where the state came from
    stop_s: float = 0.0
    place_s: float = 0.0
    start_s: float = 0.0
    load_s: float = 0.0
    first_step_s: float = 0.0
    suspended_s: float = 0.0


class Progress(View):
    step: int = 0
    steps: int
    samples: int = 0
    tokens: int = 0
    loss: float | None = None
    loss_first: float | None = None
    eval_loss: float | None = None  # on other text than is trained on, when it was last told
    eval_step: int | None = None  # after which it was
    eval_best: float | None = None  # the lowest eval.metric so far
    eval_best_step: int | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None


class ConditionView(View):
    """As Kubernetes has them: `Admitted` (holds slots), `Running` (makes steps), `Degraded` (runs on fewer slots than
    it wants), `Suspended`, `Finished`.
    """

    type: str
    status: bool
    reason: str  # one word
    message: str
    at: float  # since when the status is so


class ExitView(View):
    """Of a job that failed: what it was, and where."""

    kind: str  # of the fault
    message: str
    rank: int | None
    node: str | None
    step: int
    out_of_memory: bool
    signal: int | None = None  # that ended the process, where one is known to have
    traceback: str = ""


class JobStatus(View):
    """Kept in the store by the controller; the API adds what depends on the clock."""

    observed_generation: int = 0  # of the spec that this is the status of
    conditions: tuple[ConditionView, ...] = ()
    position: int | None = None  # in the queue, from 1, while it waits
    exit: ExitView | None = None
    attempt: int = 0
    layout: ParallelLayout | None = None
    progress: Progress
    productive_s: float = 0.0
    slot_s: float = 0.0  # seconds times slots that it held, until `slots_at`
    lost_slot_s: dict[str, float] = Field(default_factory=dict)  # of it, by the cause of incidents; or `planned`
    slots: int = 0  # that it holds since
    slots_at: float = 0.0
    placement: tuple[RankPlace, ...] = ()
    spares: tuple[str, ...] = ()  # names of the nodes that stand by
    wanted_slots: int | None = None  # by the newest request to rescale; null: as the spec has it
    standbys: int = 0  # slots on which a warm process stands by
    incidents: tuple[IncidentView, ...] = ()
    checkpoint_step: int | None = None
    checkpoint: str | None = None
    snapshot_step: int | None = None  # whose state is whole in memory
    snapshot_bytes: int = 0  # of one copy; up to two generations of two copies take memory on the nodes
    holds_slots: bool = False


class JobView(View):
    """The answer of GET /v1/jobs/{id}. Times are Unix seconds."""

    uid: str
    name: str
    project: str = "default"
    phase: Phase
    reason: str
    created_at: float
    ended_at: float | None
    cancel_requested: bool
    desired: Literal["running", "suspended", "cancelled"] = "running"  # what its user wants it to be
    generation: int = 1  # of its spec: grows with each change
    goodput: float  # productive seconds over end (or now) minus submit
    storage: str  # the job's folder: logs, checkpoints
    status: JobStatus
    spec: dict[str, Any]

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """What a person looks for; `model_dump` has all of it."""
        progress = self.status.progress
        yield from (("uid", self.uid), ("phase", self.phase.value), ("step", f"{progress.step}/{progress.steps}"))
        yield from (("loss", progress.loss), ("reason", self.reason))
