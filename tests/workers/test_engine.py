"""Every layout computes what one process computes, loss, gradients and parameters; and that is what torch computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.pool import Pool
from tests.workers import runs
from workers.data.corpus import Corpus
from workers.models.decoder import Decoder, initialise
from workers.optimizer import learning_rate

pytestmark = pytest.mark.torch

LAYOUTS = {
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "tp2": {"tp": 2},
    "dp2-pp2-tp2": {"dp": 2, "pp": 2, "tp": 2},
}
OTHERS = {
    "dp3, nothing divides by it": {"dp": 3},
    "tp4, fewer kv heads": {"tp": 4},
    "pp4": {"pp": 4},
    "pp2, micro-batches of 3": {"pp": 2, "micro_batch": 3},
    "pp2-vpp2 interleaved": {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
    "all at once, interleaved": {
        "dp": 2, "pp": 2, "vpp": 2, "tp": 2, "schedule": "interleaved_1f1b", "micro_batch": 3,
    },
}  # fmt: skip
STEPS = 20


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, object]:
    """Twenty steps on one process."""
    return pool.run(1, runs.steps, runs.spec(train={"steps": STEPS}), STEPS)[0]


def test_one_process_is_plain_torch(alone: dict) -> None:
    run = runs.spec(train={"steps": STEPS})
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    model = Decoder(run.model, corpus.vocabulary, dtype=torch.float64)
    initialise(model, run.model, run.train.seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": run.train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=run.train.betas, eps=run.train.eps)
    for step in range(STEPS):
        tokens, targets = corpus.batch(step * run.train.global_batch, run.train.global_batch)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.train.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(run.train, step + 1)
        adamw.step()
        assert alone["outcomes"][step] == pytest.approx((loss.item(), norm.item()), rel=1e-9)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(alone["tensors"][f"model.{name}"], parameter.detach().numpy(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_twenty_steps_equal_one_process(pool: Pool, alone: dict, layout: dict) -> None:
    run = runs.spec(train={"steps": STEPS}, layout=layout)
    results = pool.run(run.parallel.world, runs.steps, run, STEPS)
    for result in results:  # every rank knows the true loss
        np.testing.assert_allclose(result["outcomes"], alone["outcomes"], rtol=1e-9)
    tensors = runs.merged(results)
    assert tensors.keys() == alone["tensors"].keys()
    for name, value in tensors.items():
        np.testing.assert_allclose(value, alone["tensors"][name], rtol=0, atol=1e-9, err_msg=name)


@pytest.fixture(scope="module")
def gradient_alone(pool: Pool) -> dict[str, object]:
    return pool.run(1, runs.gradients, runs.spec())[0]


@pytest.mark.parametrize("layout", (LAYOUTS | OTHERS).values(), ids=LAYOUTS | OTHERS)
def test_raw_gradients_equal_one_process(pool: Pool, gradient_alone: dict, layout: dict) -> None:
    run = runs.spec(layout=layout)
    results = pool.run(run.parallel.world, runs.gradients, run)
    assert results[0]["loss"] == pytest.approx(gradient_alone["loss"], rel=1e-9)
    assert results[0]["norm"] == pytest.approx(gradient_alone["norm"], rel=1e-9)
    for name, value in runs.merged(results).items():
        scale = np.abs(gradient_alone["tensors"][name]).max()
        np.testing.assert_allclose(value, gradient_alone["tensors"][name], rtol=0, atol=1e-9 * scale, err_msg=name)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_lower_precisions_stay_near(pool: Pool, gradient_alone: dict, precision: str, tolerance: float) -> None:
    run = runs.spec(layout=LAYOUTS["dp2-pp2-tp2"], train={"precision": precision})
    result = pool.run(8, runs.steps, run, 1)[0]
    assert result["outcomes"][0] == pytest.approx((gradient_alone["loss"], gradient_alone["norm"]), rel=tolerance)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_one_process(pool: Pool, momentum: float) -> None:
    """AdamW hides the gradient's scale; SGD shows it."""
    train = {"optimizer": "sgd", "momentum": momentum, "learning_rate": 0.5}
    one = pool.run(1, runs.steps, runs.spec(train=train), 3)[0]
    many = runs.merged(pool.run(8, runs.steps, runs.spec(train=train, layout=LAYOUTS["dp2-pp2-tp2"]), 3))
    for name, value in many.items():
        np.testing.assert_allclose(value, one["tensors"][name], rtol=0, atol=1e-10, err_msg=name)
