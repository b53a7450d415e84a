"""A job as its user writes it, and as everyone reads it back."""

from __future__ import annotations

import enum
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from service.contracts.errors import UserError
from workers.spec import CheckpointSpec, DataSpec, ModelSpec, ParallelLayout, RunSpec, Spec, TrainSpec, check_layout


class Phase(enum.StrEnum):
    """Where a job is. A summary; events hold the facts. Terminal only when its slots are confirmed free."""

    QUEUED = "queued"
    PLACING = "placing"
    STARTING = "starting"
    RUNNING = "running"
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


class Resources(Spec):
    device: Literal["cpu", "gpu"] = "gpu"
    slots: int = Field(gt=0, description="ranks of the job: one GPU, or one CPU slot, each")


class PlacementPolicy(Spec):
    """Level that a group must not leave, or prefers not to. Without labels a node is its own rack."""

    tp: Literal["node", "any"] = "node"
    pp: Literal["prefer-rack", "rack", "any"] = "prefer-rack"


class Budgets(Spec):
    """Faults of each cause that a job survives within an hour; -1: without bound."""

    user_error: int = Field(default=3, ge=-1)
    infrastructure: int = Field(default=100, ge=-1)
    preemption: int = Field(default=-1, ge=-1)
    hang: int = Field(default=10, ge=-1)

    def of(self, cause: Cause) -> int:
        return int(getattr(self, cause.value))


class JobSpec(Spec):
    """What a user submits. Only `model`, `data`, `train.steps` and `resources.slots` have no default."""

    name: str = Field(default="job", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", description="letters, digits and dashes")
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    parallel: Literal["auto"] | ParallelLayout = "auto"
    resources: Resources
    placement: PlacementPolicy = PlacementPolicy()
    checkpoint: CheckpointSpec = CheckpointSpec()
    budgets: Budgets = Budgets()
    queue: Literal["default"] = "default"

    @model_validator(mode="after")
    def _possible(self) -> JobSpec:
        if isinstance(self.parallel, ParallelLayout):
            check_layout(self.parallel, self.model, self.train, self.resources.slots)
        return self

    def run(self, layout: ParallelLayout) -> RunSpec:
        """What the ranks of an attempt under `layout` are told."""
        return RunSpec(model=self.model, data=self.data, train=self.train, parallel=layout, checkpoint=self.checkpoint)


def parse_job(value: Any) -> JobSpec:
    """A JobSpec from what a person wrote; UserError names the field and what would work."""
    if not isinstance(value, dict):
        raise UserError(f"a job is a mapping of fields, not {type(value).__name__}", hint="see the example in the README")
    try:
        return JobSpec.model_validate(value)
    except ValidationError as error:
        raise user_error(error, JobSpec) from None


def user_error(error: ValidationError, spec: type[Spec]) -> UserError:
    """The first problem of a ValidationError in one sentence, with the other problems in the hint."""
    problems = [(_field(item["loc"]), item) for item in error.errors(include_url=False, include_context=False, include_input=False)]
    sentences = [_sentence(field, dict(item), spec) for field, item in problems]
    return UserError(sentences[0], field=problems[0][0], hint="; ".join(sentences[1:4]))


def _field(location: tuple[int | str, ...]) -> str:
    skip = {"ParallelLayout", "literal['auto']"}
    return ".".join(str(part) for part in location if part not in skip)


def _sentence(field: str, item: dict[str, Any], spec: type[Spec]) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        parent, _, name = field.rpartition(".")
        return f"unknown field {name!r}{' in ' + parent if parent else ''}; known fields: {', '.join(_known(parent, spec))}"
    if item["type"] == "missing":
        return f"field {field!r} is required"
    return f"{field}: {message}" if field else message


def _known(parent: str, spec: type[Spec]) -> list[str]:
    fields = spec.model_fields
    for name in filter(None, parent.split(".")):
        if name not in fields:
            return []
        kind = next((arg for arg in (fields[name].annotation, *getattr(fields[name].annotation, "__args__", ())) if isinstance(arg, type) and issubclass(arg, Spec)), None)
        if kind is None:
            return []
        fields = kind.model_fields
    return sorted(fields)
