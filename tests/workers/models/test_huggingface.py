"""Hugging Face's own models against ours: equal logits, weights bit-equal after a round trip, a job from an import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.workers import runs
from tests.workers.models import hub
from workers.checkpoint import manifest
from workers.checkpoint.publisher import Publisher
from workers.checkpoint.storage import Storage
from workers.data.corpus import Corpus
from workers.models import huggingface
from workers.models.decoder import Decoder
from workers.models.huggingface import Refused
from workers.reports import Resumed, ShardSaved, StepDone
from workers.spec import ModelSpec

pytestmark = pytest.mark.torch

FAMILIES = ["llama", "qwen2", "qwen3", "mixtral"]
STACKED = {**hub.MODELS["mixtral"], "stacked": True}


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    """By our decoder."""
    spec, weights = huggingface.read(str(folder))
    ours = Decoder(spec, spec.vocab_size)
    balances = {name: zeros for name, zeros in ours.named_buffers() if name.endswith("balance")}
    ours.load_state_dict({name: weight.whole() for name, weight in weights.items()} | balances)
    return ours(hub.TOKENS)


@pytest.mark.parametrize("fields", [*hub.MODELS.values(), STACKED], ids=[*hub.MODELS, "mixtral, stacked"])
def test_T20_logits_are_equal(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = hub.save(tmp_path / "hub", **fields)
    torch.testing.assert_close(logits(folder), hub.logits(folder), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", hub.MODELS.values(), ids=hub.MODELS)
def test_T20_the_round_trip_is_exact(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = hub.save(tmp_path / "hub", **fields)
    document = huggingface.import_(str(folder), str(tmp_path), "job")
    again = hub.exported(tmp_path, document, tmp_path / "again")
    assert hub.same(folder, again)
    assert torch.equal(hub.logits(folder), hub.logits(again))
    assert huggingface.read(str(again))[0] == huggingface.read(str(folder))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", ["1GB", "20KB"])
@pytest.mark.parametrize("family", ["llama", "llama, tied", "mixtral"])
def test_T20_the_round_trip_is_exact_in_any_dtype_and_files(
    tmp_path: Path, dtype: torch.dtype, size: str, family: str
) -> None:
    folder = hub.save(tmp_path / "hub", dtype=dtype, size=size, **hub.MODELS[family])
    document = huggingface.import_(str(folder), str(tmp_path), "job")
    file_bytes = 20_000 if size == "20KB" else 1 << 30
    name = str(dtype).removeprefix("torch.")
    again = hub.exported(tmp_path, document, tmp_path / "again", dtype=name, file_bytes=file_bytes)
    assert hub.same(folder, again)
    assert (len(list(again.glob("*.safetensors"))) > 1) == (size == "20KB")
    assert torch.equal(hub.logits(folder), hub.logits(again))


def test_T20_stacked_experts_are_written_one_by_one(tmp_path: Path) -> None:
    folder = hub.save(tmp_path / "hub", size="20KB", **STACKED)
    document = huggingface.import_(str(folder), str(tmp_path), "job")
    again = hub.exported(tmp_path, document, tmp_path / "again")
    assert hub.same(hub.save(tmp_path / "separate", **hub.MODELS["mixtral"]), again)
    assert torch.equal(hub.logits(folder), hub.logits(again))


@pytest.mark.parametrize("fields", [hub.MODELS["mixtral"], STACKED], ids=["separate", "stacked"])
def test_experts_are_read_by_rows(tmp_path: Path, fields: dict[str, Any]) -> None:
    separate = hub.tensors(hub.save(tmp_path / "separate", **hub.MODELS["mixtral"]))
    _, weights = huggingface.read(str(hub.save(tmp_path / "hub", **fields)))
    for ours, theirs in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        rows = weights[f"layers.2.moe.experts.{ours}"].rows(1, 2)
        names = [f"model.layers.2.block_sparse_moe.experts.{n}.{theirs}.weight" for n in (1, 2)]
        assert torch.equal(rows, torch.stack([separate[name] for name in names]))


def test_weights_are_read_by_rows(tmp_path: Path) -> None:
    folder = hub.save(tmp_path / "hub", dtype=torch.bfloat16)
    _, weights = huggingface.read(str(folder))
    whole = hub.tensors(folder)["model.layers.1.mlp.down_proj.weight"]
    down = weights["layers.1.ffn.down.weight"]
    assert (down.shape, down.dtype) == ((32, 48), "bfloat16")
    assert torch.equal(down.rows(5, 7), whole[5:12])


@pytest.mark.parametrize(
    ("family", "cut"), [("llama", "layers.0.attention.wo.weight"), ("mixtral", "layers.0.moe.experts.gate")]
)
def test_pieces_and_shards_of_any_size_hold_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, cut: str
) -> None:
    folder = hub.save(tmp_path / "hub", **hub.MODELS[family])
    monkeypatch.setattr(huggingface, "AT_ONCE", 1000)
    monkeypatch.setattr(huggingface, "SHARD", 30_000)
    document = huggingface.import_(str(folder), str(tmp_path), "job")
    assert len(document.shards) > 10
    assert len(document.tensors[f"model.{cut}"].pieces) > 3
    manifest.verify(Storage.open(str(tmp_path / "job")), document.path)
    assert hub.same(folder, hub.exported(tmp_path, document, tmp_path / "again"))


def test_any_storage_will_do(tmp_path: Path) -> None:
    folder, where = hub.save(tmp_path / "hub"), f"memory://{tmp_path.name}"
    first = huggingface.import_(str(folder), str(tmp_path), "job")
    huggingface.export(Storage.open(str(tmp_path / "job")), first, f"{where}/out", file_bytes=20_000)
    document = huggingface.import_(f"{where}/out", where, "job")
    huggingface.export(Storage.open(where).child("job"), document, str(tmp_path / "again"))
    assert hub.same(folder, tmp_path / "again")


def run_of(spec: ModelSpec, **changes: Any) -> Any:
    train = {"steps": 1, "global_batch": 4, "precision": "fp32"} | changes.pop("train", {})
    return runs.spec(model=spec.model_dump(), train=train, **changes)


@pytest.mark.parametrize(
    ("family", "layout", "optimizer"),
    [
        ("llama", {}, {"optimizer": "adamw"}),
        ("llama, tied", {"tp": 2, "pp": 2}, {"optimizer": "sgd", "momentum": 0.9}),
        ("qwen2", {"tp": 2}, {"optimizer": "adamw"}),
        ("qwen3", {"pp": 2}, {"optimizer": "adamw"}),
        ("mixtral", {"dp": 2, "ep": 2}, {"optimizer": "adamw"}),
    ],
)
def test_a_job_resumes_from_an_import_in_any_layout(
    pool: Pool, tmp_path: Path, family: str, layout: dict[str, int], optimizer: dict[str, Any]
) -> None:
    folder = hub.save(tmp_path / "hub", **hub.MODELS[family])
    document = huggingface.import_(str(folder), str(tmp_path), "run", optimizer=optimizer["optimizer"])
    run = run_of(ModelSpec.model_validate(document.model), layout=layout, train=optimizer)
    said = pool.run(run.parallel.world, runs.train, str(tmp_path), run, 1, (document.path,))[0]
    assert Resumed(0, document.path) in said

    tokens, targets = Corpus(run.data, run.model.seq_len, run.train.seed).batch(0, 4)
    expected = torch.nn.functional.cross_entropy(hub.logits(folder, tokens).flatten(0, 1), targets.flatten())
    loss = next(report.loss for report in said if isinstance(report, StepDone))
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def trained(
    pool: Pool, root: Path, model: Mapping[str, Any], resume: tuple[str, ...]
) -> tuple[list[float], manifest.Manifest]:
    """Losses of two steps with the experts on two ranks, and the checkpoint between them."""
    train, checkpoint = {"steps": 2, "learning_rate": 0.1}, {"every_steps": 1}
    run = run_of(ModelSpec.model_validate(model), layout={"dp": 2, "ep": 2}, train=train, checkpoint=checkpoint)
    said = pool.run(2, runs.train, str(root), run, 1, resume)
    storage = Storage.open(str(root)).child("run")
    saved = [report for rank in said for report in rank if isinstance(report, ShardSaved) and report.step == 1]
    path = Publisher(storage, "run", 1, "test", run).publish(1, saved)
    return [report.loss for report in said[0] if isinstance(report, StepDone)], manifest.load(storage, path)


def test_T20_a_trained_mixture_is_exported_from_its_shards(pool: Pool, tmp_path: Path) -> None:
    folder = hub.save(tmp_path / "hub", **hub.MODELS["mixtral"])
    document = huggingface.import_(str(folder), str(tmp_path), "run")
    losses, after = trained(pool, tmp_path, document.model, (document.path,))
    again = hub.exported(tmp_path, after, tmp_path / "again")
    run = runs.spec()
    tokens, targets = Corpus(run.data, 16, run.train.seed).batch(4, 4)
    expected = torch.nn.functional.cross_entropy(hub.logits(again, tokens).flatten(0, 1), targets.flatten())
    assert losses[1] == pytest.approx(expected.item(), rel=1e-5)
    assert abs(losses[1] - losses[0]) > 0.01


def test_T21_a_learnt_balance_of_experts_is_not_dropped(pool: Pool, tmp_path: Path) -> None:
    model = {"layers": 2, "hidden": 32, "heads": 8, "seq_len": 16}
    experts = {"count": 4, "top_k": 2, "hidden": 48, "bias_rate": 0.01}
    _, after = trained(pool, tmp_path, model | {"experts": experts}, ())
    with pytest.raises(Refused, match=r"layers\.0\.moe\.router\.balance is not zero, and has no place at Hugging Face"):
        hub.exported(tmp_path, after, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str) -> None:
    folder, root = hub.save(tmp_path / "hub", **hub.MODELS[family]), str(tmp_path / "runs")
    take = ["import", str(folder), "--root", root, "--job", "job", "--seq-len", "8"]
    assert huggingface.main(take) == 0
    said = json.loads(capsys.readouterr().out)
    assert ModelSpec.model_validate(said["model"]).seq_len == 8
    give = ["export", f"{root}/job/{said['manifest']}", str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert huggingface.main(give) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path / "out"), "step": 0}
    assert {tensor.dtype for tensor in hub.tensors(tmp_path / "out").values()} == {torch.bfloat16}
