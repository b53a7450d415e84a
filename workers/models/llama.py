"""What Hugging Face calls a Llama: its config.json and the names of its tensors, against our spec and logical names.

Knows no files and no torch. A config that asks for what our decoder doesn't have is refused, and everything it asks for
is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workers.spec import ModelSpec

LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

FIELDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_hidden": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
"""Our fields that every config.json has to name. Others have defaults, which are Hugging Face's."""

ABSENT = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Features that only have one value here."""


class Unsupported(ValueError):
    """The model asks for what our decoder doesn't have."""


def spec_from_config(config: Mapping[str, Any], seq_len: int | None = None) -> ModelSpec:
    """The spec of the model that a config.json describes; `seq_len` tokens, or as many positions as it was made for."""
    config = {key: value for key, value in config.items() if value is not None}
    rope = {**config.get("rope_scaling", {}), **config.get("rope_parameters", {})}  # both dialects are in use
    said = {"model_type": "none", "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0), **config}
    problems = [f"{key} {said[key]!r}" for key, only in ABSENT.items() if said.get(key, only) != only]
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        problems.append(f"rope_scaling {kind!r}")
    if missing := [key for key in FIELDS.values() if key not in config]:
        problems.append(f"without {', '.join(missing)}")
    elif config.get("head_dim", 0) not in (0, config["hidden_size"] / config["num_attention_heads"]):
        problems.append(f"head_dim {config['head_dim']} other than hidden_size / num_attention_heads")
    if problems:
        raise Unsupported(f"only a plain Llama can be taken, and this config.json says: {'; '.join(problems)}")
    return ModelSpec(
        **{ours: config[theirs] for ours, theirs in FIELDS.items()},
        kv_heads=config.get("num_key_value_heads", config["num_attention_heads"]),
        seq_len=seq_len or config.get("max_position_embeddings", 2048),
        rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        init_std=config.get("initializer_range", 0.02),
        tied_embedding=config.get("tie_word_embeddings", False),
    )


def config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The config.json of this model with tensors of this dtype."""
    return {
        "architectures": ["LlamaForCausalLM"],
        **{key: value for key, value in ABSENT.items() if value is not None},
        **{theirs: getattr(spec, ours) for ours, theirs in FIELDS.items()},
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.seq_len,
        "rope_theta": spec.rope_theta,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied_embedding,
        "torch_dtype": dtype,
    }


def foreign(name: str) -> str:
    """Hugging Face's name of our parameter."""
    match = re.fullmatch(r"(?:layers\.(\d+)\.)?([\w.]+)\.weight", name)
    number, part = match.groups() if match else (None, "")
    theirs = OUTSIDE.get(part) if number is None else LAYER.get(part)
    if theirs is None:
        raise Unsupported(f"a Llama has no tensor for {name}")
    return f"{theirs}.weight" if number is None else f"model.layers.{number}.{theirs}.weight"
