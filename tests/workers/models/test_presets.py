"""Models by name: the published sizes, and single fields that win over a preset's."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from workers import flops
from workers.models.presets import PRESETS
from workers.spec import ModelSpec

# parameters, those that a token meets, and how far the published figures are rounded
PUBLISHED = {
    "llama3-8b": (8.03e9, 8.03e9, 0.005e9),
    "llama3-70b": (70.6e9, 70.6e9, 0.05e9),
    "llama3-405b": (405e9, 405e9, 1e9),
    "gpt3-175b": (175.0e9, 175.0e9, 0.5e9),
    "mt-530b": (530e9, 530e9, 0.5e9),
    "mixtral-8x7b": (46.7e9, 12.9e9, 0.05e9),
    "deepseek-v3": (671e9, 37e9, 0.6e9),
    "qwen3-8b": (8.2e9, 8.2e9, 0.05e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    total, active, rounding = PUBLISHED[name]
    spec = ModelSpec.model_validate({"preset": name})
    assert flops.parameters(spec, spec.vocab_size) == pytest.approx(total, abs=rounding, rel=0)
    assert flops.active_parameters(spec, spec.vocab_size) == pytest.approx(active, abs=rounding, rel=0)


@pytest.mark.torch
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_built(name: str) -> None:
    import torch

    from workers.models.decoder import Decoder

    spec = ModelSpec.model_validate({"preset": name})
    with torch.device("meta"):
        model = Decoder(spec, spec.vocab_size or 257)
    assert sum(parameter.numel() for parameter in model.parameters()) == flops.parameters(spec, spec.vocab_size or 257)


def test_without_embeddings_qwen3_has_its_published_size() -> None:
    spec = ModelSpec.model_validate({"preset": "qwen3-8b"})
    inside = flops.parameters(spec, 0)
    assert inside == pytest.approx(6.95e9, abs=0.005e9, rel=0)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_written_out(name: str) -> None:
    spec = ModelSpec.model_validate({"preset": name})
    assert spec.model_dump(exclude_unset=True) == PRESETS[name]
    assert "preset" not in spec.model_dump()
    assert ModelSpec.model_validate(spec.model_dump()) == spec
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec


def test_single_fields_win() -> None:
    spec = ModelSpec.model_validate({"preset": "llama3-8b", "layers": 2, "seq_len": 16})
    assert (spec.layers, spec.seq_len) == (2, 16)
    assert (spec.hidden, spec.rope_theta) == (4096, 500_000.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"preset": "llama9"}, "preset 'llama9' is not known; there are llama3-8b, llama3-70b, llama3-405b, gpt3-175b"),
        ({"preset": ["tiny"]}, "is not known; there are llama3-8b"),
        ({"preset": "tiny", "hidden": 66}, "hidden 66 is not divisible by heads 4"),
        ({"preset": "tiny", "width": 3}, "Extra inputs are not permitted"),
    ],
)
def test_what_no_preset_is(value: dict[str, object], message: str) -> None:
    given = dict(value)
    with pytest.raises(ValidationError) as caught:
        ModelSpec.model_validate(value)
    assert message in str(caught.value)
    assert value == given  # not changed on the way
