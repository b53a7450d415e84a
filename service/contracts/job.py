"""A job as its user writes it, and as everyone reads it back."""

from __future__ import annotations

import enum
import re
import reprlib
import typing
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, ValidationInfo, field_validator, model_validator

from service.contracts.errors import UserError
from service.contracts.runtime import Runtime
from workers.models.spec import ModelSpec, Spec
from workers.spec import CheckpointSpec, DataSpec, EvalSpec, ParallelLayout, RunSpec, TrainSpec, check_layout

NAME_RULE = "1 to 63 lower-case letters, digits and dashes, with no dash at an end"


class Phase(enum.StrEnum):
    """Where a job is. A summary; events hold the facts. Terminal only when its slots are confirmed free."""

    QUEUED = "queued"
    PLACING = "placing"
    STARTING = "starting"
    RUNNING = "running"
    RESCALING = "rescaling"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RECOVERING = "recovering"
    FINISHING = "finishing"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED)


class Cause(enum.StrEnum):
    """What a fault is charged to; each has its own budget. Published in incidents."""

    USER_ERROR = "user_error"
    INFRASTRUCTURE = "infrastructure"
    PREEMPTION = "preemption"
    HANG = "hang"


class Elastic(Spec):
    """Between which sizes a job may run where there is no room for `slots`, or room for more."""

    min_slots: int = Field(gt=0, le=1_000_000)
    max_slots: int | None = Field(default=None, gt=0, le=1_000_000, description="default: resources.slots")


class Resources(Spec):
    device: Literal["cpu", "gpu"] = "gpu"
    slots: int = Field(gt=0, le=1_000_000, description="ranks of the job: one GPU, or one CPU slot, each")
    elastic: Elastic | None = None
    spares: int = Field(default=0, ge=0, le=1000, description="nodes that are held to take over from lost ones")
    standbys: bool = Field(default=True, description="whether a warm process stands behind every rank")
    probe: bool = Field(
        default=False, description="whether the devices of each node are probed before the job's first step"
    )

    @model_validator(mode="after")
    def _between(self) -> Resources:
        bounds = self.elastic
        if bounds is not None and not bounds.min_slots <= self.slots <= (bounds.max_slots or self.slots):
            raise ValueError(
                f"slots {self.slots} is outside elastic, {bounds.min_slots} to {bounds.max_slots or self.slots}"
            )
        return self


class PlacementPolicy(Spec):
    """Level that a group must not leave, or prefers not to. Without labels a node is its own rack and NVLink domain."""

    tp: Literal["nvlink", "node", "any"] = "nvlink"
    pp: Literal["prefer-rack", "rack", "any"] = "prefer-rack"
    stragglers: Literal["log", "move"] = "log"


class Budgets(Spec):
    """Faults of each cause that a job survives within an hour; -1: without bound."""

    user_error: int = Field(default=3, ge=-1)
    infrastructure: int = Field(default=100, ge=-1)
    preemption: int = Field(default=-1, ge=-1)
    hang: int = Field(default=10, ge=-1)

    def of(self, cause: Cause) -> int:
        return int(getattr(self, cause.value))


NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
LabelKey = Annotated[str, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")]
"""As Kubernetes has them."""


class InitFrom(Spec):
    """Where a job begins as long as it has no checkpoint of its own: at one of another job, or with the weights of a
    Hugging Face folder.

    A client names the job, and the step or takes its newest good one; the service finds root and manifest.
    """

    job: str | None = Field(default=None, pattern=r"^[a-z0-9-]{1,80}$", description="uid of the other job")
    huggingface: str | None = Field(
        default=None, min_length=1, max_length=1000, description="path or URI of config.json and safetensors"
    )
    step: int | None = Field(default=None, ge=0, lt=2**53)
    attempt: int | None = Field(default=None, ge=0, lt=2**31, description="that published it; default the newest")
    root: str | None = Field(default=None, description="storage root of the other job, as the service knows it")
    manifest: str | None = Field(default=None, pattern=r"^manifests/[0-9]{10,}-[0-9]{6,}\.json$")

    @model_validator(mode="after")
    def _one_of_both(self) -> InitFrom:
        if (self.job is None) == (self.huggingface is None):
            raise ValueError("names a job, or a folder under huggingface, and one of them")
        if self.job is None and not {self.step, self.attempt, self.root, self.manifest} <= {None}:
            raise ValueError("step, attempt, root and manifest are of another job's checkpoint; huggingface has none")
        return self

    @property
    def origin(self) -> tuple[str, str]:
        """(folder of the other job, manifest), once the service has found them."""
        if self.job is None or self.root is None or self.manifest is None:
            raise UserError(f"init_from: the checkpoint of job {self.job} was not looked up", field="init_from")
        return folder(self.root, self.job), self.manifest


def folder(root: str, uid: str) -> str:
    """Where a job keeps what it writes."""
    return f"{root.rstrip('/')}/{uid}"


def _branch(value: Any) -> str:
    return "auto" if isinstance(value, str) else "layout"


Parallel = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[ParallelLayout, Tag("layout")], Discriminator(_branch)
]
"""What was written chooses the branch, so that only the problems of the branch that was meant are told."""


class JobSpec(Spec):
    """What a user submits. Only `model`, `data`, `train.steps` and `resources.slots` have no default."""

    name: str = Field(default="job", pattern=NAME, description=NAME_RULE)
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    resources: Resources
    parallel: Parallel = "auto"  # below the fields that it is checked against
    placement: PlacementPolicy = PlacementPolicy()
    checkpoint: CheckpointSpec = CheckpointSpec()
    eval: EvalSpec | None = Field(default=None, description="other text to measure the loss on; null: none")
    budgets: Budgets = Budgets()
    runtime: Runtime = Runtime()
    queue: str = Field(default="default", pattern=NAME, description=NAME_RULE)
    priority: int = Field(default=0, ge=-1000, le=1000, description="within its queue; what is higher comes first")
    deadline_s: float | None = Field(
        default=None, gt=0, le=1e9, description="seconds from submission after which it ends, as failed; null: none"
    )
    init_from: InitFrom | None = Field(default=None, description="a checkpoint of another job to begin at")
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=64, description="to find it by")

    @field_validator("parallel")
    @classmethod
    def _possible(cls, value: str | ParallelLayout, known: ValidationInfo) -> str | ParallelLayout:
        others = known.data
        if isinstance(value, ParallelLayout) and {"model", "train", "resources"} <= others.keys():
            check_layout(value, others["model"], others["train"], others["resources"].slots)
        return value

    @model_validator(mode="after")
    def _something_to_adapt(self) -> JobSpec:
        if self.model.lora and self.init_from is None:
            raise ValueError("model.lora adapts the weights that init_from names, and that is missing")
        return self

    @model_validator(mode="after")
    def _something_to_evaluate(self) -> JobSpec:
        if self.evaluates_only and self.init_from is None:
            raise ValueError("eval.only evaluates what init_from names, and that is missing")
        return self

    @property
    def evaluates_only(self) -> bool:
        """Whether it trains nothing."""
        return self.eval is not None and self.eval.only

    @property
    def batches_evaluated(self) -> int:
        """In one evaluation, at most."""
        return len(self.eval.data) * self.eval.batches if self.eval else 0

    def run(self, layout: ParallelLayout) -> RunSpec:
        """What the ranks of an attempt under `layout` are told."""
        return RunSpec(
            model=self.model, data=self.data, train=self.train, parallel=layout, checkpoint=self.checkpoint,
            eval=self.eval,
        )  # fmt: skip


def parse_job(value: Any) -> JobSpec:
    """A JobSpec from what a person wrote; UserError names the field and what would work."""
    if not isinstance(value, dict):
        raise UserError(f"a job is a mapping of fields, not {reprlib.repr(value)}", hint=f"fields: {_fields(())}")
    try:
        return JobSpec.model_validate(value)
    except ValidationError as error:
        raise user_error(error) from None


def user_error(error: ValidationError) -> UserError:
    """The first problem of a JobSpec's ValidationError in one sentence, with the next problems in the hint."""
    problems = [(_path(item["loc"]), dict(item)) for item in error.errors(include_url=False, include_context=False)]
    sentences = [_sentence(path, item) for path, item in problems]
    return UserError(sentences[0], field=".".join(problems[0][0]), hint="; ".join(sentences[1:4]))


def _path(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """Names of fields, from the outermost in; without the branch of `parallel`, which no one wrote."""
    names = tuple(map(str, location))
    return names[:1] + names[2:] if names[:1] == ("parallel",) else names


def _sentence(path: tuple[str, ...], item: dict[str, Any]) -> str:
    field, message, given = ".".join(path), str(item["msg"]), reprlib.repr(item["input"])
    match item["type"]:
        case "extra_forbidden":
            parent = ".".join(path[:-1])
            where = f" in {parent}" if parent else ""
            return f"unknown field {path[-1]!r}{where}; known fields: {_fields(path[:-1])}"
        case "missing":
            return f"field {field!r} is required"
        case "string_pattern_mismatch" if field == "name":
            return f"{field} should be {NAME_RULE}, not {given}"
        case "model_type" | "literal_error" if field == "parallel":
            return f"parallel should be 'auto' or a mapping of fields ({_fields(path)}), not {given}"
        case "model_type":
            return f"{field} should be a mapping of fields ({_fields(path)}), not {given}"
        case _ if message.startswith("Input should be "):
            what = re.sub(r", (unable|got) .*", "", message.removeprefix("Input should be "))
            return f"{field} should be {what}, not {given}"
    return f"{field}: {message.removeprefix('Value error, ')}"


def _fields(path: tuple[str, ...]) -> str:
    """Names of the fields that may stand at `path`."""
    spec: type[Spec] = JobSpec
    for name in path:
        if (field := spec.model_fields.get(name)) is not None:  # else it is a place in a list
            spec = _spec(field.annotation) or spec
    return ", ".join(sorted(spec.model_fields))


def _spec(annotation: Any) -> type[Spec] | None:
    """The Spec that a field holds, also as a branch of a union."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return annotation
    return next(filter(None, map(_spec, typing.get_args(annotation))), None)
