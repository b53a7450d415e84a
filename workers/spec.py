"""What a rank is told: model, data, training, layout, checkpoints. Pure: neither torch nor Ray.

Every value that can be built here can be run: an impossible layout or model raises at once, with what would work.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from workers.models import presets

Precision = Literal["bf16", "fp32", "float64"]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb", "zbv"]
Recompute = Literal["none", "selective", "full"]
Decay = Literal["cosine", "linear", "wsd", "constant"]

BYTE_VOCABULARY = 257  # 256 bytes and one separator between documents

SERVICE_FIELDS = ("name", "resources", "placement", "budgets", "queue", "priority")
"""Fields of a job file that only the service reads; a rank run by torchrun passes over them."""


SINGLE_STAGE: tuple[Schedule, ...] = ("gpipe", "1f1b")  # one stage a pipeline rank
ANY_COUNT: tuple[Schedule, ...] = ("gpipe", "zbv")  # no rule on the number of micro-batches
ZERO_BUBBLE: tuple[Schedule, ...] = ("interleaved_zb", "zbv")


class Spec(BaseModel):
    """Frozen, and strict: an unknown field is an error, and so is a number that is not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSpec(Spec):
    """A decoder of the Llama family. Sizes count elements; `seq_len` counts tokens.

    `preset: NAME` fills in the fields of a known model; what is given beside it wins.
    """

    family: Literal["llama"] = "llama"
    layers: int = Field(gt=0, le=100_000)
    hidden: int = Field(gt=0, le=10**7)
    heads: int = Field(gt=0)
    kv_heads: int = Field(default=0, ge=0, validate_default=True, description="0 means one for each query head")
    ffn_hidden: int = Field(
        default=0, ge=0, validate_default=True, description="0 means 8/3 of hidden, rounded up to a multiple of 16"
    )
    seq_len: int = Field(gt=0)
    vocab_size: int = Field(default=0, ge=0, description="0 means the tokenizer's size")
    rope_theta: float = Field(default=10_000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    init_std: float = Field(default=0.02, gt=0)
    tied_embedding: bool = Field(default=False, description="the head is the embedding")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or "preset" not in value:
            return value
        given = dict(value)
        name = str(given.pop("preset"))
        if name not in presets.PRESETS:
            raise ValueError(f"preset {name!r} is not known; there are {', '.join(presets.PRESETS)}")
        return presets.PRESETS[name] | given

    @field_validator("kv_heads")
    @classmethod
    def _one_each(cls, value: int, known: ValidationInfo) -> int:
        return value or known.data.get("heads", 0)

    @field_validator("ffn_hidden")
    @classmethod
    def _eight_thirds(cls, value: int, known: ValidationInfo) -> int:
        return value or -(-known.data.get("hidden", 0) * 8 // 48) * 16

    @model_validator(mode="after")
    def _possible(self) -> ModelSpec:
        works = max(1, (self.hidden + self.heads) // (2 * self.heads)) * 2 * self.heads
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by heads {self.heads}; try hidden {works}")
        if self.head_dim % 2:
            raise ValueError(
                f"head size {self.head_dim} (hidden / heads) is odd; rotary positions need it even: try hidden {works}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}; "
                f"kv_heads may be one of {divisors(self.heads, 1024)}"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class DataSpec(Spec):
    """Where text comes from: `builtin:topics`, or a path or fsspec URI of text or of JSON lines with a text field."""

    source: str = "builtin:topics"
    tokenizer: str = Field(default="byte", description="`byte`, or the path or URI of a tokenizer.json")
    text_field: str = "text"


class TrainSpec(Spec):
    """The optimisation. A step trains `global_batch` samples of `seq_len` tokens, in any layout."""

    steps: int = Field(gt=0, le=10**12)
    global_batch: int = Field(default=8, gt=0, description="samples a step")
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(default=3e-4, gt=0)
    min_learning_rate: float = Field(default=0.0, ge=0)
    decay: Decay = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    decay_steps: int | None = Field(
        default=None, gt=0, description="wsd: length of the final decay; default a tenth of the horizon"
    )
    horizon: int | None = Field(
        default=None,
        gt=0,
        description="step at which the decay ends; default `steps`; a run may go on past it at the minimum",
    )
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    momentum: float = Field(default=0.0, ge=0, lt=1, description="sgd only")
    clip_norm: float | None = Field(default=1.0, gt=0)
    precision: Precision = "bf16"
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="of gradients; float64 runs use their own"
    )
    seed: int = Field(default=0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _possible(self) -> TrainSpec:
        if self.warmup_steps > self.end_of_decay:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} is longer than the horizon of {self.end_of_decay} steps"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate {self.min_learning_rate} is above learning_rate {self.learning_rate}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must each be in [0, 1)")
        return self

    @property
    def end_of_decay(self) -> int:
        return self.horizon or self.steps


class CheckpointSpec(Spec):
    """Durable checkpoints: every `every_steps` steps and at the end, the newest `keep` published ones kept."""

    root: str | None = Field(default=None, description="path or fsspec URI; default the service's own storage root")
    every_steps: int = Field(default=100, gt=0)
    keep: int = Field(default=3, gt=0)


class ParallelLayout(Spec):
    """Sizes of the mesh axes. Rank order is pp, dp, tp from outside in. Illegal combinations can't be built."""

    dp: int = Field(default=1, gt=0)
    pp: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    vpp: int = Field(default=1, gt=0, description="stages a pipeline rank holds")
    micro_batch: int = Field(default=1, gt=0, description="samples a micro-batch")
    schedule: Schedule = "1f1b"
    zero: Literal[1, 2, 3] = Field(
        default=1,
        description="1: optimizer state is sharded, one reduction a step; 2: gradients too, reduced each micro-batch; "
        "3: parameters too",
    )
    replicate: int = Field(default=1, gt=0, description="copies of the shards (HSDP); dp: plain replication")
    sequence_parallel: bool | None = Field(default=None, description="default: where tp divides seq_len")
    recompute: Recompute = "none"
    stage_layers: tuple[int, ...] | None = Field(default=None, description="layers of each stage; default even")

    @model_validator(mode="after")
    def _possible(self) -> ParallelLayout:
        if self.schedule in SINGLE_STAGE:
            if self.vpp > 1:
                raise ValueError(
                    f"vpp {self.vpp} needs schedule interleaved_1f1b or interleaved_zb, not {self.schedule}"
                )
        elif self.pp == 1 or self.vpp == 1:
            raise ValueError(f"schedule {self.schedule} needs pp > 1 and vpp > 1; use 1f1b")
        if self.schedule == "zbv" and self.vpp != 2:
            raise ValueError(f"schedule zbv needs vpp 2, not {self.vpp}")
        if self.zero > 1 and self.schedule in ZERO_BUBBLE:
            raise ValueError(
                f"zero {self.zero} reduces each micro-batch, which schedule {self.schedule} can't; use zero 1"
            )
        if self.dp % self.replicate:
            raise ValueError(
                f"replicate {self.replicate} does not divide dp {self.dp}; try {divisors(self.dp, self.dp)}"
            )
        if self.stage_layers is not None and (len(self.stage_layers) != self.stages or min(self.stage_layers) < 0):
            raise ValueError(f"stage_layers names {len(self.stage_layers)} stages; pp x vpp makes {self.stages}")
        return self

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    def micro_batches(self, global_batch: int) -> tuple[int, ...]:
        """Micro-batches of each replica in one step: 7 on 3 replicas are 3, 2, 2."""
        each, extra = divmod(global_batch // self.micro_batch, self.dp)
        return tuple(each + (replica < extra) for replica in range(self.dp))

    def runs(self, global_batch: int) -> tuple[int, ...]:
        """Micro-batches that each replica runs: its own and empty ones, where the schedule has a rule on counts or
        every micro-batch is reduced over all replicas."""
        counts = self.micro_batches(global_batch)
        if self.pp > 1 and self.schedule not in ANY_COUNT:
            unit = 1 if self.schedule in SINGLE_STAGE else self.pp
            counts = tuple(max(self.pp, -(-count // unit) * unit) for count in counts)
        return counts if self.zero == 1 else (max(counts),) * self.dp

    def splits_sequence(self, seq_len: int) -> bool:
        """Whether activations between tensor-parallel blocks are split by position."""
        return self.tp > 1 and (
            self.sequence_parallel if self.sequence_parallel is not None else seq_len % self.tp == 0
        )

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(pp, dp, tp) of a rank."""
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp

    def __str__(self) -> str:
        vpp = f" x vpp {self.vpp}" if self.vpp > 1 else ""
        return f"dp {self.dp} x pp {self.pp} x tp {self.tp}{vpp}"


def divisors(number: int, limit: int) -> list[int]:
    """Those of at most `limit`, smallest first."""
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]


def layout_problem(layout: ParallelLayout, model: ModelSpec, train: TrainSpec) -> str | None:
    """Why this layout can't train this model at this batch, or None when it can."""
    if model.heads % layout.tp:
        return f"tp {layout.tp} does not divide {model.heads} heads"
    if model.kv_heads % layout.tp and layout.tp % model.kv_heads:
        return f"tp {layout.tp} and {model.kv_heads} kv_heads: one must divide the other"
    if model.ffn_hidden % layout.tp:
        return f"tp {layout.tp} does not divide ffn_hidden {model.ffn_hidden}"
    vocabulary = model.vocab_size or BYTE_VOCABULARY
    if -(-vocabulary // layout.tp) * (layout.tp - 1) >= vocabulary:
        padded = -(-vocabulary // layout.tp) * layout.tp
        return f"tp {layout.tp} leaves ranks without a part of {vocabulary} tokens; try model.vocab_size {padded}"
    if model.layers < layout.stages:
        stages = f"{layout.stages} stages (pp {layout.pp} x vpp {layout.vpp})"
        return f"{stages} need at least {layout.stages} layers; the model has {model.layers}"
    if layout.stage_layers is not None and sum(layout.stage_layers) != model.layers:
        return (
            f"stage_layers {layout.stage_layers} sum to {sum(layout.stage_layers)}; the model has {model.layers} layers"
        )
    if layout.sequence_parallel and model.seq_len % layout.tp:
        return f"sequence_parallel needs seq_len {model.seq_len} divisible by tp {layout.tp}"
    if train.global_batch % layout.micro_batch:
        return f"global_batch {train.global_batch} is not divisible by micro_batch {layout.micro_batch}"
    if (total := train.global_batch // layout.micro_batch) < layout.dp:
        return f"{total} micro-batches are too few for {layout.dp} replicas"
    return None


def layouts(slots: int, model: ModelSpec, train: TrainSpec) -> Iterator[ParallelLayout]:
    """Every 1F1B layout of at most `slots` ranks with one-sample micro-batches that trains the model well.

    Most ranks first, then dp first.
    """
    for world in range(min(slots, train.global_batch * model.layers * model.heads), 0, -1):
        for tp in (size for size in divisors(model.heads, world) if world % size == 0):
            for pp in divisors(world // tp, model.layers):
                dp = world // tp // pp
                if train.global_batch // dp < pp:
                    continue  # only empty micro-batches would fill the pipeline: it works, and is never advised
                layout = ParallelLayout(dp=dp, pp=pp, tp=tp)
                if layout_problem(layout, model, train) is None:
                    yield layout


def check_layout(layout: ParallelLayout, model: ModelSpec, train: TrainSpec, slots: int | None = None) -> None:
    """Raise ValueError with the nearest layouts that work, when this one can't."""
    slots = slots or layout.world
    problem = layout_problem(layout, model, train)
    if layout.world > slots:
        problem = f"{layout} needs {layout.world} slots, not {slots}"
    elif layout.world < slots:
        problem = f"{layout} uses {layout.world} of {slots} slots"
    if problem is None:
        return

    def distance(other: ParallelLayout) -> tuple[int, int]:
        apart = abs(other.dp - layout.dp) + abs(other.pp - layout.pp) + abs(other.tp - layout.tp)
        return slots - other.world, apart

    nearest: list[ParallelLayout] = []
    for _, alike in itertools.groupby(layouts(slots, model, train), key=lambda other: other.world):
        nearest += sorted(alike, key=distance)
        if len(nearest) >= 3:
            break
    nearest = nearest[:3]
    hint = "; ".join(str(other) for other in nearest) or "none for this model, batch and slots: change global_batch"
    batch = " with micro_batch 1 and schedule 1f1b" if layout.micro_batch > 1 or layout.vpp > 1 else ""
    raise ValueError(f"{problem}. Layouts that work on {slots} slots{batch}: {hint}")


class RunSpec(Spec):
    """One training run in one layout: all that the ranks need to agree on."""

    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    parallel: ParallelLayout = ParallelLayout()
    checkpoint: CheckpointSpec = CheckpointSpec()

    @model_validator(mode="after")
    def _possible(self) -> RunSpec:
        check_layout(self.parallel, self.model, self.train)
        return self

    @classmethod
    def from_job(cls, job: Mapping[str, Any]) -> RunSpec:
        """The run inside a job file; fields that only the service reads are dropped."""
        return cls.model_validate({key: value for key, value in job.items() if key not in SERVICE_FIELDS})


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """Which rank of which attempt a process is, and where it meets the others."""

    job: str  # uid
    attempt: int
    token: str  # names this attempt's own checkpoint folders, so that no other attempt writes there
    rank: int
    run: RunSpec
    root: str  # storage root of the job: {root}/{job} holds its checkpoints
    store_host: str  # an IP literal
    store_port: int
    local_index: int = 0  # device of this node
    device: Literal["cpu", "gpu"] = "cpu"
    resume: tuple[str, ...] = ()  # manifests to try, newest first; none: start from the seed
    timeout_s: float = 120.0  # of every process group

    @property
    def world(self) -> int:
        return self.run.parallel.world
