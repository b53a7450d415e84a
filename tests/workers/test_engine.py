"""Every layout computes what one process computes, loss, gradients and parameters; and that is what torch computes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from tests.pool import Pool
from tests.workers import compare, runs
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
STEPS = 20


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, object]:
    """Twenty steps on one process."""
    result = pool.run(1, runs.steps, runs.spec(train={"steps": STEPS, "global_batch": 4}), STEPS)[0]
    return {"outcomes": result["outcomes"], "tensors": runs.merged([result])}


def test_one_process_is_plain_torch(alone: dict) -> None:
    run = runs.spec(train={"steps": STEPS, "global_batch": 4})
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
    run = runs.spec(train={"steps": STEPS, "global_batch": 4}, layout=layout)
    results = pool.run(run.parallel.world, runs.steps, run, STEPS)
    for result in results:  # every rank knows the true loss
        np.testing.assert_allclose(result["outcomes"], alone["outcomes"], rtol=1e-9)
    tensors = runs.merged(results)
    assert tensors.keys() == alone["tensors"].keys()
    for name, value in tensors.items():
        np.testing.assert_allclose(value, alone["tensors"][name], rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_lower_precisions_stay_near(pool: Pool, alone: dict, precision: str, tolerance: float) -> None:
    run = runs.spec(layout=LAYOUTS["dp2-pp2-tp2"], train={"precision": precision, "global_batch": 4})
    result = pool.run(8, runs.steps, run, 1)[0]
    assert result["outcomes"][0] == pytest.approx(alone["outcomes"][0], rel=tolerance)


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "zero": 2}, LAYOUTS["dp2-pp2-tp2"]])
def test_gradients_may_be_reduced_in_bf16(pool: Pool, alone: dict, layout: dict) -> None:
    """Rounded to its 8 bits once they are summed, which changes the norm and hardly."""
    train = {"precision": "fp32", "reduce_dtype": "bf16", "global_batch": 4}
    run = runs.spec(layout=layout, train=train)
    (loss, norm), *_ = pool.run(run.parallel.world, runs.steps, run, 1)[0]["outcomes"]
    assert loss == pytest.approx(alone["outcomes"][0][0], rel=1e-5)
    assert norm == pytest.approx(alone["outcomes"][0][1], rel=1e-2)
    assert norm != pytest.approx(alone["outcomes"][0][1], rel=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPU needs g++")
def test_compiled_blocks_equal_the_others(pool: Pool) -> None:
    fields: dict = {"train": {"optimizer": "sgd", "learning_rate": 0.5, "global_batch": 2}, "model": {"layers": 1}}
    plain = pool.run(2, runs.check, runs.spec(layout={"dp": 2}, **fields))
    fields["train"]["compile"] = True
    compare.same(pool.run(2, runs.check, runs.spec(layout={"dp": 2}, **fields)), plain[0] | {
        kind: [piece for result in plain for piece in result[kind]] for kind in ("gradients", "tensors")
    })  # fmt: skip


def test_momentum_equals_one_process(pool: Pool) -> None:
    train = {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.5}
    one = runs.merged(pool.run(1, runs.steps, runs.spec(train=train), 3))
    many = runs.merged(pool.run(8, runs.steps, runs.spec(train=train, layout=LAYOUTS["dp2-pp2-tp2"]), 3))
    for name, value in many.items():
        np.testing.assert_allclose(value, one[name], rtol=0, atol=1e-10, err_msg=name)
