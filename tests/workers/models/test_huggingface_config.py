"""A config.json against our spec, both ways: each family, both dialects, and what is refused by name. No files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from workers.models import families
from workers.spec import ModelSpec

CONFIG = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
}
ROPE = {"rope_type": "default", "rope_theta": 7.0}
NO_ROPE = {"rope_theta": None}

READ: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"kv_heads": 2, "seq_len": 16, "norm_eps": 1e-3, "head_dim": 4, "bias": "none", "qk_norm": False}),
    ("llama", {"num_key_value_heads": None}, {"kv_heads": 8}),
    ("llama", {"head_dim": 4}, {"head_dim": 4}),
    ("llama", {"head_dim": 6}, {"head_dim": 6}),
    ("llama", {"head_dim": None}, {"head_dim": 4}),
    ("llama", {"attention_bias": True, "mlp_bias": True}, {"bias": "all"}),
    ("llama", {"max_position_embeddings": None}, {"seq_len": 2048}),
    ("llama", NO_ROPE, {"rope_theta": 10_000.0}),
    ("llama", NO_ROPE | {"rope_parameters": ROPE}, {"rope_theta": 7.0}),
    ("llama", {"rope_scaling": {"rope_type": "default"}}, {"rope_theta": 500.0}),
    ("qwen2", {}, {"bias": "qkv", "qk_norm": False, "head_dim": 4}),
    ("qwen2", {"sliding_window": 4, "use_sliding_window": False}, {"bias": "qkv"}),
    ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 3}, {"bias": "qkv"}),
    ("qwen3", {}, {"qk_norm": True, "head_dim": 128, "bias": "none"}),
    ("qwen3", {"head_dim": 6}, {"head_dim": 6}),
    ("qwen3", {"layer_types": ["full_attention"] * 3}, {"qk_norm": True}),
    ("mixtral", {"sliding_window": 16}, {"head_dim": 4}),
    ("mixtral", NO_ROPE, {"rope_theta": 1e6}),
]


@pytest.mark.parametrize(("family", "changes", "fields"), READ)
def test_what_is_read_is_what_is_written(family: str, changes: dict[str, Any], fields: dict[str, Any]) -> None:
    spec = families.spec_from_config(CONFIG | {"model_type": family} | changes)
    assert {name: getattr(spec, name) for name in fields} == fields
    written = json.loads(json.dumps(families.config(spec, "float32")))
    assert written["model_type"] == family
    assert families.spec_from_config(written) == spec


def test_experts() -> None:
    changes = {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 3, "router_aux_loss_coef": 0.02}
    spec = families.spec_from_config(CONFIG | changes)
    assert spec.experts is not None
    assert (spec.experts.count, spec.experts.top_k, spec.experts.hidden) == (6, 3, 48)
    assert (spec.experts.score, spec.experts.normalise, spec.experts.auxiliary) == ("softmax", True, 0.0)
    default = families.spec_from_config(CONFIG | {"model_type": "mixtral"}).experts
    assert default is not None
    assert (default.count, default.top_k) == (8, 2)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_another_length_of_samples(family: str) -> None:
    config = CONFIG | {"model_type": family, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
    assert families.spec_from_config(config, seq_len=8).seq_len == 8  # a window of as many tokens hides none


REFUSED: dict[str, dict[str, Any]] = {
    "model_type 'mistral'": {"model_type": "mistral"},
    "model_type 'none'": {"model_type": None},
    "hidden_act 'gelu'": {"hidden_act": "gelu"},
    "attention_bias True with mlp_bias False": {"attention_bias": True},
    "attention_bias False with mlp_bias True": {"mlp_bias": True},
    "attention_bias True with mlp_bias False ": {"model_type": "qwen3", "attention_bias": True},
    "attention_bias True with mlp_bias True": {"model_type": "qwen2", "attention_bias": True, "mlp_bias": True},
    "attention_dropout 0.1": {"attention_dropout": 0.1},
    "rope_scaling 'llama3'": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "rope_scaling 'linear'": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope_scaling 'yarn'": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
    "partial_rotary_factor 0.5": {"partial_rotary_factor": 0.5},
    "quantization_config {'bits': 4}": {"quantization_config": {"bits": 4}},
    "sliding_window 15 in samples of 16 tokens": {"model_type": "mixtral", "sliding_window": 15},
    "sliding_window 8 in samples of 16 tokens": {
        "model_type": "qwen2",
        "sliding_window": 8,
        "use_sliding_window": True,
        "max_window_layers": 2,
    },
    "sliding_window 4 in samples of 16 tokens": {
        "model_type": "qwen3",
        "sliding_window": 4,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "layer_types 'chunked_attention'": {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
    "output_router_logits True; router_jitter_noise 0.1": {
        "model_type": "mixtral",
        "output_router_logits": True,
        "router_jitter_noise": 0.1,
    },
    "without num_hidden_layers, rms_norm_eps": {"num_hidden_layers": None, "rms_norm_eps": None},
    "hidden_act 'relu'; attention_bias True with mlp_bias False; rope_scaling 'dynamic'": {
        "hidden_act": "relu",
        "attention_bias": True,
        "rope_scaling": {"type": "dynamic"},
    },
}


@pytest.mark.parametrize(("message", "changes"), REFUSED.items(), ids=REFUSED)
def test_T21_features_that_are_not_ours(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(families.Unsupported) as caught:
        families.spec_from_config(CONFIG | {"model_type": "llama"} | changes)
    assert str(caught.value).endswith(f"Mixtral can be taken, and this config.json says: {message.strip()}")


MODEL = {"layers": 3, "hidden": 32, "heads": 8, "seq_len": 16, "vocab_size": 257}
EXPERTS = {"count": 8, "top_k": 2, "hidden": 16}
LATENT = {"key_value": 8, "plain": 4, "rotary": 2, "value": 4}
OURS: dict[str, dict[str, Any]] = {
    "family 'mine:Model'": {"family": "mine:Model"},
    "norm 'layer'; activation 'gelu'; positions 'learned'": {
        "norm": "layer",
        "activation": "gelu",
        "positions": "learned",
    },
    "latent LatentSpec(query=0, key_value=8, plain=4, rotary=2, value=4)": {"latent": LATENT},
    "bias 'qkv' with qk_norm": {"bias": "qkv", "qk_norm": True},
    "bias 'all' with no qk_norm and experts": {"bias": "all", "experts": EXPERTS},
    "bias 'none' with qk_norm and experts": {"qk_norm": True, "experts": EXPERTS},
    "hidden 36 that is no multiple of heads 8": {"hidden": 36, "head_dim": 4},
    "experts.shared 16; experts.score 'sigmoid'; experts.scale 2.5": {
        "experts": EXPERTS | {"shared": 16, "score": "sigmoid", "scale": 2.5}
    },
    "experts.first_dense 1; experts.normalise False; experts.groups 2": {
        "experts": EXPERTS | {"first_dense": 1, "normalise": False, "groups": 2}
    },
}


@pytest.mark.parametrize(("message", "fields"), OURS.items(), ids=OURS)
def test_T21_options_that_are_not_theirs(message: str, fields: dict[str, Any]) -> None:
    spec = ModelSpec.model_validate(MODEL | fields)
    for attempt in (lambda: families.config(spec, "float32"), lambda: families.origins(spec, {})):
        with pytest.raises(families.Unsupported) as caught:
            attempt()
        assert str(caught.value) == f"no plain Llama or Qwen2 or Qwen3 or Mixtral has {message}"
