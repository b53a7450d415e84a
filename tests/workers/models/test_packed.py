"""Packed documents are read alone: losses as if each were by itself, and no document knows of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workers.models import registry
from workers.models.decoder import initialise
from workers.models.samples import Samples
from workers.models.spec import ModelSpec

pytestmark = pytest.mark.torch

BASE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 48, "seq_len": 24}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": {"kv_heads": 4, "norm": "layer", "activation": "gelu", "positions": "learned", "bias": "all"},
    "latent": {"kv_heads": 4, "latent": {"query": 12, "key_value": 8, "plain": 4, "rotary": 2, "value": 6}},
    "experts": {"experts": {"count": 4, "top_k": 2, "hidden": 24}},
    "own": {"family": "workers.models.example:ParallelDecoder"},
}
SIZES = (7, 1, 12)  # positions of each document; four more fill the sample
VOCABULARY = 50


def made(name: str) -> torch.nn.Module:
    spec = ModelSpec.model_validate(BASE | MODELS[name])
    model = registry.of(spec)(spec, VOCABULARY, dtype=torch.float64)
    initialise(model, spec, 7)
    return model


def sample(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [1, 24] and where the document of each begins."""
    tokens = torch.randint(VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(seed))
    begins, at = [], 0
    for size in SIZES:
        begins += [at] * size
        at += size
    return tokens, torch.tensor([begins + list(range(at, 24))])


@pytest.mark.parametrize("name", MODELS)
def test_a_documents_logits_are_those_of_the_document_alone(name: str) -> None:
    model, (tokens, starts) = made(name), sample()
    packed = model(tokens, Samples(torch.zeros(1, dtype=torch.int64), starts))
    at = 0
    for size in SIZES:
        alone = model(tokens[:, at : at + size])
        torch.testing.assert_close(packed[:, at : at + size], alone, rtol=1e-12, atol=1e-13)
        at += size


@pytest.mark.parametrize("name", MODELS)
def test_a_change_of_one_document_reaches_no_other(name: str) -> None:
    model, (tokens, starts) = made(name), sample()
    samples = Samples(torch.zeros(1, dtype=torch.int64), starts)
    before = model(tokens, samples)
    tokens[:, 3] = (tokens[:, 3] + 1) % VOCABULARY
    after = model(tokens, samples)
    moved = (before - after).abs().amax(-1)[0]
    assert (moved > 1e-6).tolist() == [3 <= at < SIZES[0] for at in range(24)]
    assert moved[SIZES[0] :].max() < 1e-14  # experts see other rows beside it, and add in another order


def test_the_gradient_of_one_documents_loss_is_of_that_document_alone() -> None:
    model, (tokens, starts) = made("llama"), sample()
    rows = model.embedding.weight
    logits = model(tokens, Samples(torch.zeros(1, dtype=torch.int64), starts))
    (gradient,) = torch.autograd.grad(logits[:, 8:20].square().sum(), rows)
    touched = set(gradient.abs().sum(1).nonzero().flatten().tolist())
    assert touched == set(tokens[0, 8:20].tolist())
