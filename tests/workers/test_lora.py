"""Adapters and frozen parameters: equal to one process under every layout, and kept alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.pool import Pool
from tests.workers import compare, runs
from tests.workers.models import hub
from workers.checkpoint import manifest
from workers.checkpoint.publisher import Publisher
from workers.checkpoint.storage import Storage
from workers.models import adapters, huggingface, lora, registry
from workers.models.decoder import initialise
from workers.models.spec import LoraSpec, ModelSpec
from workers.reports import ShardSaved, StepDone

pytestmark = pytest.mark.torch

EVERY = {"rank": 3, "alpha": 6.0, "targets": ["wq", "wk", "wv", "wo", "gate", "up", "down"]}
LATENT = {"query": 12, "key_value": 8, "plain": 4, "rotary": 2, "value": 6}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 4},
    "tp without sequence parallelism": {"tp": 4, "sequence_parallel": False},
    "pp": {"pp": 4},
    "dp": {"dp": 3},
    "zero 3": {"dp": 3, "zero": 3},
    "all": {"dp": 2, "pp": 2, "tp": 2, "recompute": "full"},
    "zbv": {"pp": 2, "vpp": 2, "schedule": "zbv"},
    "interleaved": {"dp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "zero": 2},
}
SGD = {"optimizer": "sgd", "learning_rate": 0.5, "global_batch": 4}


def checked(pool: Pool, layout: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The figures of one process, which are the layout's."""
    run = runs.spec(layout=layout, **changes)
    alone = pool.run(1, runs.check, runs.spec(**changes))[0]
    compare.same(pool.run(run.parallel.world, runs.check, run), alone)
    return alone


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("train", [{}, SGD], ids=["adamw", "sgd"])
def test_adapters_are_trained_as_in_one_process(pool: Pool, layout: str, train: dict[str, Any]) -> None:
    alone = checked(pool, LAYOUTS[layout], model={"lora": EVERY}, train=train)
    kept = runs.merged([alone])
    assert {name.rpartition(".")[2] for name in kept} == {"lora_a", "lora_b"}
    assert any(np.abs(value).max() > 0 for name, value in kept.items() if name.endswith("lora_b"))


@pytest.mark.parametrize(
    "model",
    [
        {"latent": LATENT, "kv_heads": 8, "lora": {"targets": ["wq", "wq_down", "wkv_down", "wkv", "wo"]}},
        {"bias": "all", "norm": "layer", "activation": "gelu", "lora": {"targets": ["wk", "wo", "up", "down"]}},
        {"tied_embedding": True, "qk_norm": True, "lora": {}},
        {"experts": {"count": 4, "top_k": 2, "hidden": 24, "shared": 16}, "lora": {"targets": ["wv", "gate", "down"]}},
    ],
    ids=["latent", "gpt", "tied", "experts"],
)
def test_adapters_of_other_models(pool: Pool, model: dict[str, Any]) -> None:
    checked(pool, {"pp": 2, "tp": 2}, model=model)


@pytest.mark.parametrize(
    ("layout", "freeze"),
    [
        ({"dp": 2, "tp": 2}, ["embedding.*", "*norm*"]),
        ({"pp": 4}, ["embedding.*", "layers.0.*", "layers.2.*"]),
        ({"pp": 2, "tp": 2}, ["head.weight", "norm.*", "layers.2.*", "layers.3.*"]),
        ({"dp": 3, "zero": 3}, ["layers.1.*"]),
        ({"pp": 2, "vpp": 2, "schedule": "zbv"}, ["layers.*.ffn.*"]),
    ],
)
def test_what_is_frozen_stays_and_the_rest_is_trained_as_in_one_process(
    pool: Pool, layout: dict[str, Any], freeze: list[str]
) -> None:
    alone = checked(pool, layout, train={"freeze": freeze})
    kept, run = runs.merged([alone]), runs.spec(train={"freeze": freeze})
    model = registry.part(run.model, 257, run.train.freeze, dtype=torch.float64)
    initialise(model, run.model, run.train.seed)
    fixed = {name: p.detach().numpy() for name, p in model.named_parameters() if not p.requires_grad}
    assert fixed
    for name, value in model.named_parameters():
        assert np.array_equal(kept[f"model.{name}"], value.detach().numpy()) == (name in fixed)
        assert (f"optimizer.exp_avg.{name}" in kept) == (name not in fixed)


@pytest.mark.parametrize(
    ("freeze", "says"),
    [(["layers.9.*"], "no parameter is called layers.9."), (["*"], "leaves nothing to train")],
)
def test_patterns_that_can_not_be_meant(pool: Pool, freeze: list[str], says: str) -> None:
    with pytest.raises(Exception, match=says):
        pool.run(1, runs.check, runs.spec(train={"freeze": freeze}))


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # by PEFT, of the library below it
@pytest.mark.parametrize(
    ("family", "layout", "loaded"),
    [
        ("llama", {"tp": 2, "pp": 2}, torch.float64),
        ("qwen3, tied", {"dp": 2, "tp": 2}, torch.float64),
        ("mixtral", {"pp": 2}, torch.float32),  # the library multiplies experts in no other
    ],
)
def test_merged_and_as_pefts_adapter_it_is_the_same_model(
    pool: Pool, tmp_path: Path, family: str, layout: dict[str, int], loaded: torch.dtype
) -> None:
    folder = hub.save(tmp_path / "hub", dtype=torch.float64, **hub.MODELS[family])
    targets = ["wq", "wk", "wv", "wo"] if family == "mixtral" else EVERY["targets"]
    base, _ = huggingface.read(str(folder))
    model = base.model_dump() | {"lora": {**EVERY, "targets": targets}}
    run = runs.spec(model=model, train={"learning_rate": 0.1}, layout=layout, checkpoint={"every_steps": 1})
    said = pool.run(run.parallel.world, runs.train_from, str(tmp_path), run, str(folder))
    storage = Storage.open(str(tmp_path / "run"))
    last = [one for reports in said for one in reports if isinstance(one, ShardSaved) and one.step == 3]
    path = Publisher(storage, "run", 1, "test", run).publish(3, last)
    document = manifest.load(storage, path)
    assert all("lora_" in name for name in document.tensors)
    for kind in (True, False):
        adapters.export(storage, document, str(tmp_path / ("peft" if kind else "merged")), adapter=kind)
    kept, near = {"dtype": loaded}, {"rtol": 1e-9, "atol": 1e-10} if loaded == torch.float64 else {}
    plain, merged = (AutoModelForCausalLM.from_pretrained(one, **kept) for one in (folder, tmp_path / "merged"))
    before = logits(plain, hub.TOKENS)
    adapted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "peft"))
    theirs = logits(adapted, hub.TOKENS)
    assert (theirs - before).abs().max() > 1e-3
    torch.testing.assert_close(logits(merged, hub.TOKENS), theirs, **near)

    train = {"learning_rate": 0.1, "steps": 4, "horizon": 3}
    resumed = pool.run(
        4, runs.resume_from, str(tmp_path), runs.spec(model=model, train=train, layout={"dp": 4}), (path,), str(folder)
    )
    straight = pool.run(
        1, runs.train_from, str(tmp_path / "straight"), runs.spec(model=model, train=train), str(folder)
    )
    (found,) = (one for one in resumed[0] if isinstance(one, StepDone))
    expected = [one for one in straight[0] if isinstance(one, StepDone)][-1]
    assert (found.step, found.loss) == (4, pytest.approx(expected.loss, rel=1e-9))


def test_an_adapted_model_begins_as_the_model_and_is_it_with_larger_matrices() -> None:
    base = ModelSpec(layers=2, hidden=32, heads=4, kv_heads=2, seq_len=16)
    spec = base.model_copy(update={"lora": LoraSpec(**EVERY)})
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(3))
    plain, adapted = (registry.part(one, 50, dtype=torch.float64) for one in (base, spec))
    for model in (plain, adapted):
        initialise(model, base, 5)
    torch.testing.assert_close(adapted(tokens), plain(tokens), rtol=0, atol=0)
    own = dict(adapted.named_parameters())
    with torch.no_grad():
        for name, parameter in own.items():
            if name.endswith(lora.UP):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
        for name, delta in lora.deltas(own, LoraSpec(**EVERY)).items():
            plain.get_parameter(name).add_(delta)
    torch.testing.assert_close(adapted(tokens), plain(tokens), rtol=1e-10, atol=1e-12)
