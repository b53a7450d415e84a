"""What a rank is told: model, data, training, layout, checkpoints. Pure: neither torch nor Ray.

Every value that can be built here can be run: an impossible layout or model raises at once, with what would work.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from workers.models.spec import ModelSpec, Spec, divisors

Precision = Literal["bf16", "fp16", "fp32", "float64"]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb", "zbv"]
Recompute = Literal["none", "selective", "inner", "full"]
Decay = Literal["cosine", "linear", "wsd", "constant"]

BUILT_IN_TEXT = "builtin:topics"
IGNORED = -100  # a target that is not to be learned
BYTE_VOCABULARY = 257  # 256 bytes and one separator between documents

SERVICE_FIELDS = ("name", "resources", "placement", "budgets", "queue", "priority")
"""Fields of a job file that only the service reads; a rank run by torchrun passes over them."""


SINGLE_STAGE: tuple[Schedule, ...] = ("gpipe", "1f1b")  # one stage a pipeline rank
ANY_COUNT: tuple[Schedule, ...] = ("gpipe", "zbv")  # no rule on the number of micro-batches
ZERO_BUBBLE: tuple[Schedule, ...] = ("interleaved_zb", "zbv")


class SourceSpec(Spec):
    """One source of a mixture; its weight is its share of the samples, over the sum of all weights."""

    source: str
    weight: float = Field(default=1.0, gt=0, le=1e9)
    text_field: str = "text"


class DataSpec(Spec):
    """Where text comes from: `builtin:topics`; a path or fsspec URI of text, JSON lines or Parquet with a text field;
    or a folder of what `phalanx data prepare` made. Or several of them, mixed.
    """

    source: str = BUILT_IN_TEXT
    sources: tuple[SourceSpec, ...] | None = Field(
        default=None, min_length=1, max_length=256, description="a mixture, in place of source"
    )
    packing: Literal["none", "documents"] = Field(
        default="none",
        description="how text becomes samples: cut from one long run; or whole documents side by side, each read alone",
    )
    format: Literal["text", "chat"] = Field(
        default="text",
        description="chat: rows are conversations, or an instruction with its answer, of which the assistant's part is "
        "learned",
    )
    template: str = Field(
        default="auto",
        description="of conversations: chatml; path or URI of a Jinja file or a tokenizer_config.json; auto: what is "
        "beside the tokenizer, else chatml",
    )
    tokenizer: str = Field(default="byte", description="`byte`, or the path or URI of a tokenizer.json")
    text_field: str = "text"

    @model_validator(mode="after")
    def _one_or_several(self) -> DataSpec:
        if self.sources is not None:
            if self.source != BUILT_IN_TEXT:
                raise ValueError("source and sources are both given; put source into sources")
            names = [one.source for one in self.sources]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"sources names {twice} twice; give it the weight of both")
        if self.format == "chat" and self.packing != "documents":
            raise ValueError("format chat needs packing documents: each conversation is read alone")
        return self


class EvalSource(Spec):
    """Text that is evaluated apart from the others, under a name of its own."""

    source: str
    name: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="default the last part of source, up to its point"
    )
    text_field: str = "text"

    @property
    def label(self) -> str:
        last = self.source.rstrip("/").rpartition("/")[2]
        return self.name or re.sub(r"[^A-Za-z0-9_-]+", "-", last.partition(".")[0].rpartition(":")[2])[:64] or "text"


class EvalSpec(Spec):
    """How good the model is on text that it is not trained on; every `every` steps, and after the last."""

    data: tuple[EvalSource, ...] = Field(min_length=1, max_length=64)
    every: int = Field(default=100, gt=0, description="steps between evaluations")
    batches: int = Field(
        default=8, gt=0, description="of global_batch samples of each source; of a smaller one, each sample once"
    )
    metric: str = Field(
        default="loss", description="what decides which evaluation is best: loss, of all tokens; or a source's name"
    )
    keep_best: bool = Field(default=True, description="the best evaluation's state is saved, and stays")
    patience: int | None = Field(
        default=None, gt=0, description="evaluations in a row without a better one after which the run ends"
    )
    min_delta: float = Field(default=0.0, ge=0, description="nats by which a better one is lower")
    only: bool = Field(default=False, description="evaluate once, where init_from says, and train nothing")

    @model_validator(mode="after")
    def _named_once(self) -> EvalSpec:
        if twice := next((name for name in self.names if self.names.count(name) > 1), None):
            raise ValueError(f"data names {twice} twice; give each source a name of its own")
        if self.metric != "loss" and self.metric not in self.names:
            raise ValueError(f"metric {self.metric} is no source; use loss, {', '.join(self.names)}")
        return self

    @property
    def names(self) -> list[str]:
        return [one.label for one in self.data]

    def due(self, step: int, last: int) -> bool:
        """Whether an evaluation follows `step` of a run up to step `last`."""
        return step > 0 and (step % self.every == 0 or step >= last)

    def enough(self, worse: int) -> bool:
        """Whether a run ends after so many evaluations without a better one."""
        return self.patience is not None and worse >= self.patience


class SpikeSpec(Spec):
    """What is done about a loss that is far above the recent ones."""

    action: Literal["off", "log", "rollback"] = Field(
        default="log",
        description="rollback: to the newest checkpoint, leaving out all samples since, the step's own included",
    )
    window: int = Field(default=128, ge=16, le=4096, description="recent steps whose losses make the band")
    factor: float = Field(default=8.0, gt=0, le=1000, description="robust standard deviations from its middle")


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
    freeze: tuple[str, ...] = Field(
        default=(), max_length=64, description="names of parameters that are not trained, as layers.0.*"
    )
    precision: Precision = Field(default="bf16", description="of products; bf16 and fp16 keep parameters in fp32")
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="of gradients; float64 runs use their own"
    )
    seed: int = Field(default=0, ge=0, lt=2**63)
    non_finite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="where loss or gradient is no number: stop; leave the step's samples out; or go back to the newest "
        "checkpoint and leave out all samples since",
    )
    spikes: SpikeSpec = SpikeSpec()
    compile: bool = Field(default=False, description="of each block, by torch.compile")
    traffic_every: int = Field(
        default=0, ge=0, description="steps between counts of collectives and bytes by mesh axis; 0: never"
    )
    drift_every: int = Field(
        default=100, ge=0, description="steps between checks that copies of parameters are equal; 0: never"
    )
    replay_every: int = Field(
        default=0,
        ge=0,
        description="steps between checks that all replicas compute the same from the same samples; each costs a step "
        "without its update; 0: never",
    )

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
    """Durable checkpoints: every `every_steps` steps and at the end. The newest `keep` good ones stay, two at least."""

    root: str | None = Field(default=None, description="path or fsspec URI; default the service's own storage root")
    every_steps: int = Field(default=100, gt=0)
    keep: int = Field(default=3, gt=0)
    keep_every: int | None = Field(default=None, gt=0, description="those of a multiple of these steps stay for ever")
    snapshot_every: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
        default="auto",
        description="steps between snapshots in the memory of two nodes; 0: none; auto: by what they cost",
    )


class ParallelLayout(Spec):
    """Sizes of the mesh axes. Rank order is pp, dp, tp from outside in; ep divides dp x tp's ranks among the experts.

    Illegal combinations can't be built.
    """

    dp: int = Field(default=1, gt=0)
    pp: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    ep: int = Field(default=1, gt=0, description="ranks of dp x tp that have all experts between them")
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
    stage_layers: tuple[int, ...] | Literal["weighed"] | None = Field(
        default=None, description="layers of each stage; default even; weighed: the head counts as what it costs"
    )
    replica_weights: tuple[float, ...] | None = Field(
        default=None, description="each replica's share of the micro-batches, for slower devices; default equal"
    )

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
        if self.recompute == "selective" and self.schedule in ZERO_BUBBLE:
            raise ValueError(
                f"schedule {self.schedule} goes back through a stage twice, which recompute selective can't; use full"
            )
        if self.dp % self.replicate:
            raise ValueError(
                f"replicate {self.replicate} does not divide dp {self.dp}; try {divisors(self.dp, self.dp)}"
            )
        if (ranks := self.dp // self.replicate * self.tp) % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide the {ranks} ranks of dp x tp{' of one copy' * (self.replicate > 1)}; "
                f"try {divisors(ranks, ranks)}"
            )
        if self.replica_weights and (len(self.replica_weights) != self.dp or min(self.replica_weights) <= 0):
            raise ValueError(f"replica_weights must be {self.dp} numbers above 0, one for each of dp {self.dp}")
        named = self.stage_layers if isinstance(self.stage_layers, tuple) else (0,) * self.stages
        if len(named) != self.stages or min(named) < 0:
            raise ValueError(f"stage_layers names {len(named)} stages; pp x vpp makes {self.stages}")
        return self

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    def micro_batches(self, global_batch: int) -> tuple[int, ...]:
        """Micro-batches of each replica in one step: 7 on 3 replicas are 3, 2, 2. At least one each where there are
        enough; by weights, what is left over goes where the largest part was cut off."""
        total = global_batch // self.micro_batch
        weights = self.replica_weights or (1.0,) * self.dp
        shares = [(total - self.dp) * weight / sum(weights) for weight in weights]
        counts = [1 + int(share) for share in shares]
        by_rest = sorted(range(self.dp), key=lambda replica: (int(shares[replica]) - shares[replica], replica))
        for replica in by_rest[: total - sum(counts)]:
            counts[replica] += 1
        return tuple(counts)

    def share(self, cursor: int, global_batch: int, replica: int) -> tuple[int, int]:
        """(first, count) of the samples that a replica takes of the step at `cursor`."""
        counts = self.micro_batches(global_batch)
        return cursor + sum(counts[:replica]) * self.micro_batch, counts[replica] * self.micro_batch

    def runs(self, global_batch: int) -> tuple[int, ...]:
        """Micro-batches that each replica runs: its own and empty ones, where the schedule has a rule on counts or
        every micro-batch has something exchanged between replicas."""
        counts = self.micro_batches(global_batch)
        if self.pp > 1 and self.schedule not in ANY_COUNT:
            unit = 1 if self.schedule in SINGLE_STAGE else self.pp
            counts = tuple(max(self.pp, -(-count // unit) * unit) for count in counts)
        return (max(counts),) * self.dp if self.zero > 1 or self.tp % self.ep else counts

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
        ep = f" x ep {self.ep}" if self.ep > 1 else ""
        return f"dp {self.dp} x pp {self.pp} x tp {self.tp}{ep}{vpp}"


def layout_problem(layout: ParallelLayout, model: ModelSpec, train: TrainSpec) -> str | None:
    """Why this layout can't train this model at this batch, or None when it can."""
    if model.heads % layout.tp:
        return f"tp {layout.tp} does not divide {model.heads} heads"
    if model.kv_heads % layout.tp and layout.tp % model.kv_heads:
        return f"tp {layout.tp} and {model.kv_heads} kv_heads: one must divide the other"
    if model.ffn_hidden % layout.tp and not model.has_experts(0):
        return f"tp {layout.tp} does not divide ffn_hidden {model.ffn_hidden}"
    if (problem := _experts_problem(layout, model)) is not None:
        return problem
    vocabulary = model.vocab_size or BYTE_VOCABULARY
    if -(-vocabulary // layout.tp) * (layout.tp - 1) >= vocabulary:
        padded = -(-vocabulary // layout.tp) * layout.tp
        return f"tp {layout.tp} leaves ranks without a part of {vocabulary} tokens; try model.vocab_size {padded}"
    if model.layers < layout.stages:
        stages = f"{layout.stages} stages (pp {layout.pp} x vpp {layout.vpp})"
        return f"{stages} need at least {layout.stages} layers; the model has {model.layers}"
    if isinstance(layout.stage_layers, tuple) and sum(layout.stage_layers) != model.layers:
        return (
            f"stage_layers {layout.stage_layers} sum to {sum(layout.stage_layers)}; the model has {model.layers} layers"
        )
    if layout.sequence_parallel and model.seq_len % layout.tp:
        return f"sequence_parallel needs seq_len {model.seq_len} divisible by tp {layout.tp}"
    if train.replay_every and layout.ep > 1:
        return f"replay_every compares replicas, which have the experts between them at ep {layout.ep}; use ep 1"
    if train.compile and layout.schedule in ZERO_BUBBLE:
        return f"schedule {layout.schedule} goes back through a stage twice, which compiled blocks can't"
    if train.global_batch % layout.micro_batch:
        return f"global_batch {train.global_batch} is not divisible by micro_batch {layout.micro_batch}"
    if (total := train.global_batch // layout.micro_batch) < layout.dp:
        return f"{total} micro-batches are too few for {layout.dp} replicas"
    return None


def _experts_problem(layout: ParallelLayout, model: ModelSpec) -> str | None:
    if model.experts is None:
        return f"ep {layout.ep} needs a model with experts" if layout.ep > 1 else None
    if model.experts.count % layout.ep:
        return f"ep {layout.ep} does not divide {model.experts.count} experts"
    if model.experts.shared % layout.tp:
        return f"tp {layout.tp} does not divide experts.shared {model.experts.shared}"
    if layout.tp > 1 and not layout.splits_sequence(model.seq_len):
        return f"experts at tp {layout.tp} need sequence parallelism, and so seq_len {model.seq_len} divisible by tp"
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
    eval: EvalSpec | None = None

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
    origin: tuple[str, str] | None = None  # (another job's folder, manifest): where a job without a checkpoint begins
    weights: str | None = None  # Hugging Face folder whose weights a job without a checkpoint begins with
    skip: tuple[int, int] | None = None  # (step, samples): continuing after this step, so many are left out
    timeout_s: float = 120.0  # of every process group

    @property
    def world(self) -> int:
        return self.run.parallel.world
