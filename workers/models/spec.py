"""What a model is: a decoder's sizes and options, by name or field by field. Pure: no torch.

Every value that can be built here can be built as a model; an impossible one raises at once, with what would work.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from workers.models import presets

BUILT_IN = "llama"


class Spec(BaseModel):
    """Frozen, and strict: an unknown field is an error, and so is a number that is not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth(cls, value: Any, known: ValidationInfo) -> Any:
        return without_truth(cls, value, known)


def without_truth(spec: type[BaseModel], value: Any, known: ValidationInfo) -> Any:
    """The value as it is; ValueError where a number is `true` or `false`, which Python takes for one."""
    items = value if isinstance(value, list | tuple) else (value,)
    if any(isinstance(item, bool) for item in items) and not _truthful(spec, known.field_name or ""):
        raise ValueError(f"should not be {str(value).lower()}")
    return value


@functools.cache
def _truthful(spec: type[BaseModel], name: str) -> bool:
    """Whether the field may be true or false."""
    return not {bool, Any}.isdisjoint(_leaves(spec.model_fields[name].annotation))


def _leaves(annotation: Any) -> set[Any]:
    inner = get_args(annotation)
    return {annotation} if not inner else set().union(*map(_leaves, inner))


class ExpertSpec(Spec):
    """A mixture of experts in place of a block's feed-forward network; every token is taken by `top_k` of `count`."""

    count: int = Field(gt=1, le=65_536)
    top_k: int = Field(gt=0)
    hidden: int = Field(gt=0, description="inner size of one expert")
    shared: int = Field(default=0, ge=0, description="inner size of the expert that takes every token; 0: none")
    first_dense: int = Field(default=0, ge=0, description="layers before the first with experts")
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = Field(default=True, description="the weights of the chosen sum to 1")
    scale: float = Field(default=1.0, gt=0, description="of the chosen experts' sum")
    groups: int = Field(default=1, gt=0, description="of experts; a token's choice is limited to `top_groups` of them")
    top_groups: int = Field(default=1, gt=0)
    auxiliary: float = Field(default=0.0, ge=0, description="weight of the balance loss of each sequence")
    bias_rate: float = Field(default=0.0, ge=0, description="a step's change of the biases that balance the choice")

    @model_validator(mode="after")
    def _possible(self) -> ExpertSpec:
        if self.count % self.groups or self.top_groups > self.groups:
            raise ValueError(
                f"{self.count} experts can't be in {self.groups} groups of which {self.top_groups} are chosen; "
                f"groups may be one of {divisors(self.count, 1024)}"
            )
        if self.top_k > (most := self.count // self.groups * self.top_groups):
            raise ValueError(f"top_k {self.top_k} is more than the {most} experts that can be chosen from")
        return self


class LatentSpec(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come from a small latent vector."""

    query: int = Field(default=0, ge=0, description="size of the queries' latent vector; 0: none")
    key_value: int = Field(gt=0, description="size of the keys' and values' latent vector")
    plain: int = Field(gt=0, description="size of a head's part without positions")
    rotary: int = Field(gt=0, multiple_of=2, description="size of a head's part with positions")
    value: int = Field(gt=0, description="size of a head's value")


Target = Literal["wq", "wk", "wv", "wo", "gate", "up", "down", "wq_down", "wkv_down", "wkv"]


class LoraSpec(Spec):
    """Low-rank adapters (LoRA, arXiv 2106.09685): they are trained, and the model that they are put on is not."""

    rank: int = Field(default=8, gt=0, le=65_536)
    alpha: float | None = Field(
        default=None, gt=0, description="scales what an adapter adds by alpha / rank; default by 1"
    )
    targets: tuple[Target, ...] = Field(
        default=("wq", "wv"), min_length=1, description="matrices of every block: of attention and of the dense network"
    )

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank


class ModelSpec(Spec):
    """A decoder-only transformer. Sizes count elements; `seq_len` counts tokens.

    `preset: NAME` fills in the fields of a known model; what is given beside it wins.
    """

    family: str = Field(
        default=BUILT_IN, description="llama: a decoder with the options below; or MODULE:CLASS, the path of your own"
    )
    layers: int = Field(gt=0, le=100_000)
    hidden: int = Field(gt=0, le=10**7)
    heads: int = Field(gt=0)
    kv_heads: int = Field(default=0, ge=0, validate_default=True, description="0 means one for each query head")
    head_dim: int = Field(default=0, ge=0, validate_default=True, description="0 means hidden / heads")
    ffn_hidden: int = Field(
        default=0, ge=0, validate_default=True, description="0 means 8/3 of hidden, rounded up to a multiple of 16"
    )
    seq_len: int = Field(gt=0)
    vocab_size: int = Field(default=0, ge=0, description="0 means the tokenizer's size")
    rope_theta: float = Field(default=10_000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    init_std: float = Field(default=0.02, gt=0)
    tied_embedding: bool = Field(default=False, description="the head is the embedding")
    norm: Literal["rms", "layer"] = "rms"
    activation: Literal["swiglu", "gelu"] = "swiglu"
    positions: Literal["rotary", "learned"] = "rotary"
    bias: Literal["none", "qkv", "all"] = "none"
    qk_norm: bool = Field(default=False, description="RMSNorm of each head's queries and keys")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="of the embedding and of what each sub-layer adds")
    experts: ExpertSpec | None = None
    latent: LatentSpec | None = None
    lora: LoraSpec | None = None

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

    @field_validator("family")
    @classmethod
    def _known(cls, value: str) -> str:
        if value != BUILT_IN and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
            raise ValueError(f"{value!r} is neither {BUILT_IN} nor an import path as my_package.my_module:MyModel")
        return value

    @field_validator("kv_heads")
    @classmethod
    def _one_each(cls, value: int, known: ValidationInfo) -> int:
        return value or known.data.get("heads", 0)

    @field_validator("head_dim")
    @classmethod
    def _share(cls, value: int, known: ValidationInfo) -> int:
        hidden, heads = known.data.get("hidden", 0), known.data.get("heads", 1)
        if not value and hidden % heads:
            works = max(1, (hidden + heads) // (2 * heads)) * 2 * heads
            raise ValueError(f"hidden {hidden} is not divisible by heads {heads}; name head_dim, or try hidden {works}")
        return value or hidden // heads

    @field_validator("ffn_hidden")
    @classmethod
    def _eight_thirds(cls, value: int, known: ValidationInfo) -> int:
        return value or -(-known.data.get("hidden", 0) * 8 // 48) * 16

    @model_validator(mode="after")
    def _possible(self) -> ModelSpec:
        if self.head_dim % 2 and self.positions == "rotary" and self.latent is None:
            works = max(1, (self.hidden + self.heads) // (2 * self.heads)) * 2 * self.heads
            raise ValueError(
                f"head size {self.head_dim} (hidden / heads) is odd; rotary positions need it even: try hidden {works}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}; "
                f"kv_heads may be one of {divisors(self.heads, 1024)}"
            )
        if self.experts and self.experts.first_dense >= self.layers:
            raise ValueError(f"experts.first_dense {self.experts.first_dense} leaves none of {self.layers} layers")
        if self.latent and (self.kv_heads != self.heads or self.qk_norm or self.bias != "none"):
            raise ValueError("latent attention has a key for each query head, no qk_norm and no bias")
        return self

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.first_dense


def divisors(number: int, limit: int) -> list[int]:
    """Those of at most `limit`, smallest first."""
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]
