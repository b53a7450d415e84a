import pytest

from service.core.plan import shape
from workers import flops
from workers.models import presets
from workers.models.spec import ModelSpec
from workers.spec import BYTE_VOCABULARY


@pytest.mark.parametrize("name", presets.PRESETS)
def test_agrees_with_what_workers_count(name):
    model = ModelSpec.model_validate({"preset": name})
    vocabulary = model.vocab_size or BYTE_VOCABULARY
    found = shape.of(model)
    assert found.flops() == pytest.approx(flops.per_token(model, vocabulary, model.seq_len), rel=1e-9)
    assert found.flops(causal=True) == pytest.approx(
        flops.per_token(model, vocabulary, model.seq_len, "causal"), rel=1e-9
    )
    # norms and biases are left out: little in a model of any size
    assert found.parameters == pytest.approx(flops.parameters(model, vocabulary), rel=0.01)
    assert found.parameters <= flops.parameters(model, vocabulary)
