"""Hugging Face's own Llama against ours: equal logits, weights bit-equal after a round trip, refusals by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.pool import Pool
from tests.workers import runs
from workers.checkpoint import manifest
from workers.checkpoint.storage import Storage
from workers.data.corpus import Corpus
from workers.models import huggingface, llama
from workers.models.decoder import Decoder
from workers.models.huggingface import Refused
from workers.reports import Resumed, StepDone
from workers.spec import ModelSpec

pytestmark = pytest.mark.torch

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
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
SHAPES = {
    "grouped queries": {},
    "a key for each query": {"num_key_value_heads": 8},
    "one key for all": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
}
TOKENS = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(3))

Hub = Callable[..., Path]


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    """A folder that `save_pretrained` wrote of a random Llama: CONFIG with changes, in a dtype, in files of a size."""
    transformers.utils.logging.disable_progress_bar()

    def make(dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **changes: Any) -> Path:
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG | changes))
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        model.to(dtype).save_pretrained(tmp_path / "hub", max_shard_size=max_shard_size)
        return tmp_path / "hub"

    return make


@torch.no_grad()
def logits(folder: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """By Hugging Face."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def exported(root: Path, document: manifest.Manifest, folder: Path, **options: Any) -> Path:
    huggingface.export(Storage.open(str(root)).child(document.job), document, str(folder), **options)
    return folder


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_logits_are_equal(hub: Hub, changes: dict[str, Any]) -> None:
    folder = hub(**changes)
    spec, weights = huggingface.read(str(folder))
    ours = Decoder(spec, spec.vocab_size)
    ours.load_state_dict({name: weight.whole() for name, weight in weights.items()})
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), logits(folder), rtol=1e-5, atol=1e-5)


def test_weights_are_read_by_rows(hub: Hub) -> None:
    folder = hub(torch.bfloat16)
    _, weights = huggingface.read(str(folder))
    whole = tensors(folder)["model.layers.1.mlp.down_proj.weight"]
    down = weights["layers.1.ffn.down.weight"]
    assert (down.shape, down.dtype) == ((32, 48), "bfloat16")
    assert torch.equal(down.rows(5, 7), whole[5:12])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", ["1GB", "20KB"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_round_trip_is_exact(hub: Hub, tmp_path: Path, dtype: torch.dtype, size: str, tied: bool) -> None:
    folder = hub(dtype, size, tie_word_embeddings=tied)
    document = huggingface.import_(str(folder), str(tmp_path), "job")
    file_bytes = 20_000 if size == "20KB" else 1 << 30
    name = str(dtype).removeprefix("torch.")
    again = exported(tmp_path, document, tmp_path / "again", dtype=name, file_bytes=file_bytes)

    before, after = tensors(folder), tensors(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and after[n].dtype == dtype for n in before)
    assert (len(list(again.glob("*.safetensors"))) > 1) == (size == "20KB")
    assert torch.equal(logits(folder), logits(again))


def test_pieces_and_shards_of_any_size_hold_the_same(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub()
    monkeypatch.setattr(huggingface, "AT_ONCE", 1000)
    monkeypatch.setattr(huggingface, "SHARD", 30_000)
    document = huggingface.import_(str(folder), str(tmp_path), "job")
    assert len(document.shards) > 10
    assert len(document.tensors["model.layers.0.attention.wo.weight"].pieces) > 3
    manifest.verify(Storage.open(str(tmp_path / "job")), document.path)
    again = tensors(exported(tmp_path, document, tmp_path / "again"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors(folder).items())


def test_any_storage_will_do(hub: Hub, tmp_path: Path) -> None:
    folder, where = hub(), f"memory://{tmp_path.name}"
    first = huggingface.import_(str(folder), str(tmp_path), "job")
    huggingface.export(Storage.open(str(tmp_path / "job")), first, f"{where}/out", file_bytes=20_000)
    document = huggingface.import_(f"{where}/out", where, "job")
    huggingface.export(Storage.open(where).child("job"), document, str(tmp_path / "again"))
    again = tensors(tmp_path / "again")
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors(folder).items())


def run_of(spec: ModelSpec, **changes: Any) -> Any:
    train = {"steps": 1, "global_batch": 4, "precision": "fp32"} | changes.pop("train", {})
    return runs.spec(model=spec.model_dump(), train=train, **changes)


@pytest.mark.parametrize(
    ("changes", "layout", "optimizer"),
    [
        ({}, {}, {"optimizer": "adamw"}),
        ({"tie_word_embeddings": True}, {"tp": 2, "pp": 2}, {"optimizer": "sgd", "momentum": 0.9}),
    ],
)
def test_a_job_resumes_from_an_import_in_any_layout(
    pool: Pool, hub: Hub, tmp_path: Path, changes: dict[str, Any], layout: dict[str, int], optimizer: dict[str, Any]
) -> None:
    folder = hub(**changes)
    document = huggingface.import_(str(folder), str(tmp_path), "run", optimizer=optimizer["optimizer"])
    run = run_of(ModelSpec.model_validate(document.model), layout=layout, train=optimizer)
    said = pool.run(run.parallel.world, runs.train, str(tmp_path), run, 1, (document.path,))[0]
    assert Resumed(0, document.path) in said

    tokens, targets = Corpus(run.data, run.model.seq_len, run.train.seed).batch(0, 4)
    expected = torch.nn.functional.cross_entropy(logits(folder, tokens).flatten(0, 1), targets.flatten())
    loss = next(report.loss for report in said if isinstance(report, StepDone))
    assert loss == pytest.approx(expected.item(), rel=1e-5)


REFUSED = {
    "model_type 'mistral'": {"model_type": "mistral"},
    "model_type 'none'": {"model_type": None},
    "hidden_act 'gelu'": {"hidden_act": "gelu"},
    "attention_bias True": {"attention_bias": True},
    "mlp_bias True": {"mlp_bias": True},
    "attention_dropout 0.1": {"attention_dropout": 0.1},
    "rope_scaling 'llama3'": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "rope_scaling 'linear'": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope_scaling 'yarn'": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
    "partial_rotary_factor 0.5": {"partial_rotary_factor": 0.5},
    "quantization_config {'bits': 4}": {"quantization_config": {"bits": 4}},
    "head_dim 16 other than hidden_size / num_attention_heads": {"head_dim": 16},
    "without num_hidden_layers, rms_norm_eps": {"num_hidden_layers": None, "rms_norm_eps": None},
    "hidden_act 'relu'; attention_bias True; rope_scaling 'dynamic'": {
        "hidden_act": "relu",
        "attention_bias": True,
        "rope_scaling": {"type": "dynamic"},
    },
}


@pytest.mark.parametrize(("message", "changes"), REFUSED.items(), ids=REFUSED)
def test_features_that_are_not_ours(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(llama.Unsupported) as caught:
        llama.spec_from_config(CONFIG | {"model_type": "llama"} | changes)
    assert str(caught.value).endswith(f"this config.json says: {message}")


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"num_key_value_heads": None}, "kv_heads", 8),
        ({"rope_theta": None}, "rope_theta", 10_000.0),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rope_theta", 7.0),
        ({"rope_scaling": {"rope_type": "default"}}, "rope_theta", 500.0),
        ({"head_dim": 4}, "head_dim", 4),
        ({}, "seq_len", 16),
        ({}, "norm_eps", 1e-3),
    ],
)
def test_both_dialects_of_a_config_are_read(changes: dict[str, Any], field: str, value: float) -> None:
    spec = llama.spec_from_config(CONFIG | {"model_type": "llama"} | changes)
    assert getattr(spec, field) == value
    written = json.loads(json.dumps(llama.config(spec, "float32")))
    assert llama.spec_from_config(written) == spec


def test_another_length_of_samples() -> None:
    assert llama.spec_from_config(CONFIG | {"model_type": "llama"}, seq_len=8).seq_len == 8


NORM, QUERY = "model.norm.weight", "model.layers.2.self_attn.q_proj.weight"


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Tensors put in place or taken away, dots written as __."""
    new = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    kept = {name: tensor for name, tensor in (tensors(folder) | new).items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"model__norm__weight": None}, [f"{NORM} is missing"]),
        ({"extra": torch.zeros(2)}, ["extra is unexpected"]),
        ({"lm_head__bias": torch.zeros(257)}, ["lm_head.bias is unexpected"]),
        ({"model__norm__weight": torch.zeros(31)}, [f"{NORM} has shape (31,), not (32,)"]),
        ({"model__norm__weight": torch.zeros(32).bfloat16()}, [f"{NORM} is bfloat16, not float32"]),
        (
            {
                "model__norm__weight": None,
                "extra": torch.zeros(2, dtype=torch.int8),
                QUERY.replace(".", "__"): torch.zeros(1),
            },
            [
                f"{NORM} is missing",
                "extra is unexpected",
                f"{QUERY} has shape (1,), not (32, 32)",
                "extra is int8, not float32",
            ],
        ),
    ],
)
def test_tensors_that_do_not_fit_are_all_named(
    hub: Hub, changes: dict[str, torch.Tensor | None], problems: list[str]
) -> None:
    folder = hub()
    change(folder, **changes)
    with pytest.raises(Refused) as caught:
        huggingface.read(str(folder))
    assert str(caught.value) == f"{folder}: {'; '.join(problems)}"


def test_a_head_that_is_not_its_embedding_is_refused(hub: Hub) -> None:
    folder = hub(tie_word_embeddings=True)
    embedding = tensors(folder)["model.embed_tokens.weight"]
    change(folder, lm_head__weight=embedding.clone())
    spec, weights = huggingface.read(str(folder))
    assert spec.tied_embedding
    assert "head.weight" not in weights
    change(folder, lm_head__weight=embedding + 1)
    with pytest.raises(Refused, match=r"lm_head\.weight is unexpected"):
        huggingface.read(str(folder))


def test_another_dtype_than_asked_is_refused(hub: Hub, tmp_path: Path) -> None:
    folder = hub()
    with pytest.raises(Refused, match=r"model\.embed_tokens\.weight is float32, not bfloat16; .*, and 20 more"):
        huggingface.read(str(folder), dtype="bfloat16")
    hub(torch.float64)
    with pytest.raises(Refused, match=r"embedding\.weight is float64, which float32 would round"):
        huggingface.import_(str(folder), str(tmp_path), "job")
    assert not manifest.published(Storage.open(str(tmp_path / "job")))


def test_an_index_and_its_files_must_agree(hub: Hub) -> None:
    folder = hub(max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = index["weight_map"][NORM]
    (folder / file).unlink()
    with pytest.raises(Refused, match=rf"{file} is missing; .*{NORM} is missing"):
        huggingface.read(str(folder))
    save_file({"extra": torch.zeros(2)}, folder / file)
    with pytest.raises(Refused, match=rf"extra is in {file}, against the index; .*{NORM} is not in {file}"):
        huggingface.read(str(folder))


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"there is no config\.json; a folder that `save_pretrained` wrote is wanted"):
        huggingface.read(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "llama"}))
    with pytest.raises(Refused, match=r"there is neither model\.safetensors nor model\.safetensors\.index\.json"):
        huggingface.read(str(tmp_path))


def test_nothing_is_written_over(hub: Hub, tmp_path: Path) -> None:
    folder = hub()
    document = huggingface.import_(str(folder), str(tmp_path), "job")
    with pytest.raises(Refused, match=r"the job has checkpoints already, the newest manifests/0000000000-000000\.json"):
        huggingface.import_(str(folder), str(tmp_path), "job")
    with pytest.raises(Refused, match="the folder is not empty"):
        exported(tmp_path, document, folder)


def test_values_too_large_for_a_dtype_are_not_exported(hub: Hub, tmp_path: Path) -> None:
    folder = hub()
    change(folder, model__norm__weight=torch.full((32,), 1e6))
    document = huggingface.import_(str(folder), str(tmp_path), "job")
    with pytest.raises(Refused, match=r"norm\.weight has values that are too large for float16"):
        exported(tmp_path, document, tmp_path / "half", dtype="float16")


def test_a_checkpoint_of_another_model_is_not_exported(hub: Hub, tmp_path: Path) -> None:
    document = huggingface.import_(str(hub()), str(tmp_path), "job")
    other = manifest.Manifest(
        **{field: getattr(document, field) for field in manifest.Manifest.__slots__}
        | {"model": {**document.model, "tied_embedding": True}}
    )
    with pytest.raises(Refused, match=r"manifests/0000000000-000000\.json: head\.weight is unexpected"):
        exported(tmp_path, other, tmp_path / "again")


def test_the_command_line(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, root = hub(), str(tmp_path / "runs")
    take = ["import", str(folder), "--root", root, "--job", "job", "--seq-len", "8"]
    assert huggingface.main(take) == 0
    said = json.loads(capsys.readouterr().out)
    assert ModelSpec.model_validate(said["model"]).seq_len == 8
    assert (
        huggingface.main(["export", f"{root}/job/{said['manifest']}", str(tmp_path / "out"), "--dtype", "bfloat16"])
        == 0
    )
    assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path / "out"), "step": 0}
    assert {tensor.dtype for tensor in tensors(tmp_path / "out").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "nowhere", "--root", "runs", "--job", "job"], "nowhere: there is no config.json"),
        (["export", "job.json", "out"], "job.json is no manifest of a job: ROOT/JOB/manifests/STEP-ATTEMPT.json"),
        (["export", "job/manifests/0000000001-000001.json", "out"], "manifests/0000000001-000001.json: missing"),
    ],
)
def test_what_the_command_line_refuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert huggingface.main(arguments) == 2
    assert capsys.readouterr().err.startswith(message)
