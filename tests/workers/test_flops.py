"""Model FLOPs are what torch counts, operator by operator, in the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from workers import flops
from workers.models.decoder import Decoder
from workers.spec import ModelSpec

pytestmark = pytest.mark.torch

MODEL = {"layers": 3, "hidden": 32, "heads": 4, "ffn_hidden": 80, "seq_len": 24}
EXPERTS = {"count": 6, "top_k": 2, "hidden": 24}
LATENT = {"key_value": 12, "plain": 6, "rotary": 4, "value": 5}
GPT = {"norm": "layer", "activation": "gelu", "positions": "learned", "bias": "all"}
MODELS = {
    "MHA": {},
    "GQA": {"kv_heads": 2},
    "one kv head": {"kv_heads": 1},
    "tied": {"tied_embedding": True},
    "other sizes": {"layers": 1, "hidden": 48, "heads": 6, "kv_heads": 3, "ffn_hidden": 64, "seq_len": 10},
    "wide heads": {"head_dim": 14, "kv_heads": 2},
    "q/k norm": {"qk_norm": True},
    "biases of q, k, v": {"bias": "qkv", "kv_heads": 2},
    "all biases": {"bias": "all"},
    "GELU": {"activation": "gelu"},
    "GPT": GPT | {"tied_embedding": True},
    "MoE": {"experts": EXPERTS},
    "MoE, first dense": {"experts": EXPERTS | {"first_dense": 2}},
    "MoE, shared expert": {"experts": EXPERTS | {"shared": 40, "first_dense": 1, "auxiliary": 0.1, "bias_rate": 0.1}},
    "MoE, groups": {"experts": EXPERTS | {"groups": 3, "top_groups": 2, "score": "sigmoid"}},
    "MoE of GPT": GPT | {"experts": EXPERTS | {"shared": 40}},
    "MLA": {"latent": LATENT},
    "MLA, small queries": {"latent": LATENT | {"query": 20}},
    "MLA and MoE": {"latent": LATENT | {"query": 20}, "experts": EXPERTS | {"shared": 40, "first_dense": 1}},
}
VOCABULARY, SAMPLES = 53, 3


def decoder(changes: dict[str, Any]) -> tuple[ModelSpec, Decoder]:
    spec = ModelSpec.model_validate(MODEL | changes)
    return spec, Decoder(spec, VOCABULARY)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_T18_flops_equal_a_count_of_operators(changes: dict[str, Any]) -> None:
    spec, model = decoder(changes)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    tokens = torch.randint(VOCABULARY, (SAMPLES, spec.seq_len), generator=generator)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:  # torch has no formula for the fused kernel of CPUs
        loss = model.seams.loss(model(tokens), tokens)
        assert counter.get_total_flops() == flops.per_token(spec, VOCABULARY, spec.seq_len) * tokens.numel() / 3
        loss.backward()
    assert counter.get_total_flops() == flops.per_token(spec, VOCABULARY, spec.seq_len) * tokens.numel()


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_parameters_are_those_of_the_model(changes: dict[str, Any]) -> None:
    spec, model = decoder(changes)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert flops.parameters(spec, VOCABULARY) == held
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    idle = experts * (6 - 2) // 6
    assert flops.active_parameters(spec, VOCABULARY) == held - idle


def test_causal_counts_half_of_the_scores() -> None:
    spec, _ = decoder({})
    full, half = (flops.per_token(spec, VOCABULARY, 1000, attention) for attention in ("full", "causal"))
    assert full - half == 6 * spec.layers * spec.hidden * 1000
    assert half == flops.per_token(spec, VOCABULARY, 500)


PUBLISHED = {
    # parameters and model FLOPs a token that are known; 6 N + 12 layers x hidden x seq, without the embedding's part
    "llama 3 8b": (
        {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "seq_len": 8192},
        128_256,
        8_030_261_248,
    ),
    "llama 2 7b": (
        {"layers": 32, "hidden": 4096, "heads": 32, "ffn_hidden": 11008, "seq_len": 4096},
        32_000,
        6_738_415_616,
    ),
}


@pytest.mark.parametrize(("fields", "vocabulary", "known"), PUBLISHED.values(), ids=PUBLISHED)
def test_known_models(fields: dict[str, Any], vocabulary: int, known: int) -> None:
    spec = ModelSpec.model_validate(fields)
    assert flops.parameters(spec, vocabulary) == known
    multiplied = known - vocabulary * spec.hidden - (2 * spec.layers + 1) * spec.hidden
    palm = 6 * multiplied + 12 * spec.layers * spec.hidden * spec.seq_len
    assert flops.per_token(spec, vocabulary, spec.seq_len) == palm
