"""Models by name: the published sizes, and single fields that win over a preset's."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from workers.models.presets import PRESETS
from workers.spec import ModelSpec


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "parameters"), [("llama3-8b", 8.03e9), ("llama3-70b", 70.6e9), ("llama3-405b", 405.9e9)]
)
def test_published_sizes(name: str, parameters: float) -> None:
    import torch

    from workers.models.decoder import Decoder

    spec = ModelSpec(preset=name)
    with torch.device("meta"):
        model = Decoder(spec, spec.vocab_size)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(parameters, rel=1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_written_out(name: str) -> None:
    spec = ModelSpec.model_validate({"preset": name})
    assert PRESETS[name].items() <= spec.model_dump().items()
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
        ({"preset": "llama9"}, "preset 'llama9' is not known; there are llama3-8b, llama3-70b, llama3-405b, tiny"),
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
