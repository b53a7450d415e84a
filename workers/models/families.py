"""Families of models as Hugging Face names them: config.json against our spec, tensors against our parameters.

Knows no files and no torch. What a family has and our decoder lacks, or the other way round, is refused, and all of it
is named. What only shapes training (dropout, the balance of experts, initial values) changes no model: it is left out
where a config.json has no word for it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from workers.models.spec import BUILT_IN, ModelSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Fused:
    """A tensor of theirs that has all experts, in each of which `of` of our matrices lie one below the other."""

    name: str
    place: int = 0
    of: int = 1


Names = Mapping[str, str | Fused]
"""Of a layer's parts, ours to theirs; {} stands for an expert's number."""

ATTENTION = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
DENSE: Names = ATTENTION | {"ffn.gate": "mlp.gate_proj", "ffn.up": "mlp.up_proj", "ffn.down": "mlp.down_proj"}
SEPARATE: Names = ATTENTION | {
    "moe.router": "block_sparse_moe.gate",
    "moe.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
    "moe.experts.up": "block_sparse_moe.experts.{}.w3.weight",
    "moe.experts.down": "block_sparse_moe.experts.{}.w2.weight",
}
STACKED: Names = ATTENTION | {
    "moe.router": "mlp.gate",
    "moe.experts.gate": Fused("mlp.experts.gate_up_proj", 0, 2),
    "moe.experts.up": Fused("mlp.experts.gate_up_proj", 1, 2),
    "moe.experts.down": Fused("mlp.experts.down_proj"),
}
OUTSIDE: Names = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    title: str
    architecture: str
    defaults: Mapping[str, Any]  # of keys that a config.json may leave out
    biases: Mapping[tuple[bool, bool], str]  # (attention_bias, mlp_bias) to our `bias`; the first of equals is written
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # features that have one value here
    qk_norm: bool = False
    experts: bool = False
    layouts: tuple[Names, ...] = (DENSE,)  # of files; the first is written, each is read


WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "rope_theta": 1e4} | WINDOW
MIXTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "rope_theta": 1e6}

FAMILIES = {
    "llama": Family(
        "Llama",
        "LlamaForCausalLM",
        defaults={"max_position_embeddings": 2048, "rope_theta": 1e4},
        biases={(False, False): "none", (True, True): "all"},
    ),
    "qwen2": Family(
        "Qwen2",
        "Qwen2ForCausalLM",
        defaults=QWEN,
        biases={(True, False): "qkv", (False, False): "qkv"},  # it has them whatever is said
    ),
    "qwen3": Family(
        "Qwen3",
        "Qwen3ForCausalLM",
        defaults=QWEN | {"head_dim": 128},
        biases={(False, False): "none"},
        qk_norm=True,
    ),
    "mixtral": Family(
        "Mixtral",
        "MixtralForCausalLM",
        defaults=MIXTRAL | {"num_local_experts": 8, "num_experts_per_tok": 2},
        biases={(False, False): "none"},
        only={"output_router_logits": False, "router_jitter_noise": 0.0},
        experts=True,
        layouts=(SEPARATE, STACKED),
    ),
}
"""By model_type."""

TITLES = " or ".join(family.title for family in FAMILIES.values())

FIELDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_hidden": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
"""Our fields that every config.json has to name. Others have defaults, which are Hugging Face's."""

ONLY = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Features that have one value in every family."""

NULLS = ("num_key_value_heads", "head_dim", "sliding_window")
"""Keys whose null is not their default."""

PLAIN = {"family": BUILT_IN, "norm": "rms", "activation": "swiglu", "positions": "rotary", "latent": None}
PLAIN_EXPERTS = {"shared": 0, "first_dense": 0, "score": "softmax", "normalise": True, "scale": 1.0, "groups": 1}
"""What every model that can be given has."""


class Unsupported(ValueError):
    """One side asks for what the other doesn't have."""


FREE = ("seq_len", "init_std", "vocab_size", "dropout", "lora")
"""Of a model, what a run may change when it begins with weights or continues: tensors say how many rows they have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where a parameter, or one expert's part of it, is: as many elements of their tensor, from element `first` on."""

    tensor: str
    shape: tuple[int, ...]  # of their tensor
    part: tuple[int, ...]  # of ours
    first: int = 0


def spec_from_config(config: Mapping[str, Any], seq_len: int | None = None) -> ModelSpec:
    """The spec of the model that a config.json describes; `seq_len` tokens, or as many positions as it was made for."""
    kind = config.get("model_type") or "none"
    family = FAMILIES.get(kind, FAMILIES["llama"])
    given = {key: value for key, value in config.items() if value is not None or key in NULLS}
    rope = {**given.get("rope_scaling", {}), **given.get("rope_parameters", {})}  # both dialects are in use
    said = {**family.defaults, "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0), **given}
    seq = seq_len or said["max_position_embeddings"]
    biased = (said.get("attention_bias", False), said.get("mlp_bias", False))
    problems = [f"model_type {kind!r}"] if kind not in FAMILIES else []
    problems += [f"{key} {said[key]!r}" for key, only in (ONLY | family.only).items() if said.get(key, only) != only]
    if biased not in family.biases:
        problems.append(f"attention_bias {biased[0]!r} with mlp_bias {biased[1]!r}")
    if (scaling := rope.get("rope_type", rope.get("type", "default"))) != "default":
        problems.append(f"rope_scaling {scaling!r}")
    problems += _windows(said, seq)
    if missing := [key for key in FIELDS.values() if key not in said]:
        problems.append(f"without {', '.join(missing)}")
    if problems:
        raise Unsupported(f"only a plain {TITLES} can be taken, and this config.json says: {'; '.join(problems)}")
    return ModelSpec(
        **{ours: said[theirs] for ours, theirs in FIELDS.items()},
        kv_heads=said.get("num_key_value_heads") or 0,
        head_dim=said.get("head_dim") or 0,
        seq_len=seq,
        rope_theta=rope.get("rope_theta", said["rope_theta"]),
        init_std=said.get("initializer_range", 0.02),
        tied_embedding=said.get("tie_word_embeddings", False),
        bias=family.biases[biased],
        qk_norm=family.qk_norm,
        experts=_experts(said) if family.experts else None,
    )


def differences(ours: ModelSpec, theirs: ModelSpec, vocabulary: int) -> list[str]:
    """Why weights of the one are none of the other; empty where they are."""
    mine, other = ours.model_dump(exclude=set(FREE)), theirs.model_dump(exclude=set(FREE))
    found = [f"{name} is {other[name]!r} there, not {mine[name]!r}" for name in mine if mine[name] != other[name]]
    if vocabulary < (theirs.vocab_size or 0):
        found.append(f"the vocabulary has {theirs.vocab_size} rows there, and {vocabulary} here: set model.vocab_size")
    return found


def config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The config.json of this model with tensors of this dtype. Raises Unsupported."""
    kind, family = of(spec)
    attention_bias, mlp_bias = next(pair for pair, bias in family.biases.items() if bias == spec.bias)
    value = {
        "architectures": [family.architecture],
        "model_type": kind,
        **{key: only for key, only in (ONLY | family.only).items() if only is not None},
        **{theirs: getattr(spec, ours) for ours, theirs in FIELDS.items()},
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "max_position_embeddings": spec.seq_len,
        "rope_theta": spec.rope_theta,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied_embedding,
        "torch_dtype": dtype,
    }
    if spec.experts:
        value["num_local_experts"] = spec.experts.count
        value["num_experts_per_tok"] = spec.experts.top_k
        value["intermediate_size"] = spec.experts.hidden
    return value


def origins(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], there: Collection[str] = ()
) -> dict[str, tuple[Origin, ...]]:
    """Where the parameters of these names and shapes are: one origin, or one for each expert. Raises Unsupported.

    Of the family's layouts the one with most tensors `there`; the one to be written has an origin for each tensor.
    """
    _, family = of(spec)
    found = [{name: _origins(names, name, shape) for name, shape in shapes.items()} for names in family.layouts]
    return max(found, key=lambda one: len({origin.tensor for many in one.values() for origin in many} & {*there}))


def of(spec: ModelSpec) -> tuple[str, Family]:
    """The model_type and family that have this model. Raises Unsupported."""
    problems = [f"{field} {getattr(spec, field)!r}" for field, only in PLAIN.items() if getattr(spec, field) != only]
    if spec.experts:
        said = ((field, getattr(spec.experts, field), only) for field, only in PLAIN_EXPERTS.items())
        problems += [f"experts.{field} {value!r}" for field, value, only in said if value != only]
    options = (spec.experts is not None, spec.qk_norm)
    fitting = [
        (kind, family)
        for kind, family in FAMILIES.items()
        if (family.experts, family.qk_norm) == options and spec.bias in family.biases.values()
    ]
    if not fitting:
        problems.append(f"bias {spec.bias!r} with {'' if spec.qk_norm else 'no '}qk_norm{' and experts' * options[0]}")
    elif fitting[0][0] == "llama" and spec.hidden % spec.heads:
        problems.append(f"hidden {spec.hidden} that is no multiple of heads {spec.heads}")
    if problems:
        raise Unsupported(f"no plain {TITLES} has {'; '.join(problems)}")
    return fitting[0]


def _origins(names: Names, name: str, shape: tuple[int, ...]) -> tuple[Origin, ...]:
    match = re.fullmatch(r"(?:layers\.(\d+)\.)?([\w.]+?)(\.weight|\.bias)?", name)
    number, part, kind = match.groups("") if match else ("", "", "")
    theirs = (names if number else OUTSIDE).get(part)
    if theirs is None:
        raise Unsupported(f"{name} has no name at Hugging Face")
    layer = f"model.layers.{number}." if number else ""
    one = shape[1:]
    if isinstance(theirs, Fused):
        whole = (shape[0], theirs.of * shape[1], *shape[2:])
        firsts = ((expert * theirs.of + theirs.place) * math.prod(one) for expert in range(shape[0]))
        return tuple(Origin(layer + theirs.name, whole, one, first) for first in firsts)
    if "{}" in theirs:
        return tuple(Origin(layer + theirs.format(expert), one, one) for expert in range(shape[0]))
    return (Origin(layer + theirs + kind, shape, shape),)


def _experts(said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "count": said["num_local_experts"],
        "top_k": said["num_experts_per_tok"],
        "hidden": said["intermediate_size"],
    }


def _windows(said: Mapping[str, Any], seq_len: int) -> list[str]:
    """Where a layer would not see all positions of a sample before its own."""
    kinds = said.get("layer_types", [])
    problems = [f"layer_types {kind!r}" for kind in sorted({*kinds} - {"full_attention", "sliding_attention"})]
    window = said.get("sliding_window") if said.get("use_sliding_window", True) else None
    by_number = said.get("num_hidden_layers", 0) > said.get("max_window_layers", 0)
    if window is not None and window < seq_len and ("sliding_attention" in kinds if kinds else by_number):
        problems.append(f"sliding_window {window} in samples of {seq_len} tokens")
    return problems
