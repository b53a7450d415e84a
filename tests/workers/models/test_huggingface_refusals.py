"""What can't be held exactly is refused on the way in and on the way out, and all of it is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.workers.models import hub
from workers.checkpoint import manifest
from workers.checkpoint.storage import Storage
from workers.models import families, huggingface
from workers.models.huggingface import Refused

pytestmark = pytest.mark.torch

NORM, QUERY = "model.norm.weight", "model.layers.2.self_attn.q_proj.weight"
BIAS, Q_NORM = "model.layers.1.self_attn.k_proj.bias", "model.layers.0.self_attn.q_norm.weight"
LAST_BIAS = "model.layers.1.self_attn.o_proj.bias"
EXPERTS = "model.layers.1.block_sparse_moe.experts"
EXPERT, ROUTER = f"{EXPERTS}.2.w3.weight", "model.layers.1.block_sparse_moe.gate.weight"

MISFITS: list[tuple[str, dict[str, torch.Tensor | None], list[str]]] = [
    ("llama", {NORM: None}, [f"{NORM} is missing"]),
    ("llama", {"extra": torch.zeros(2)}, ["extra is unexpected"]),
    ("llama", {"lm_head.bias": torch.zeros(257)}, ["lm_head.bias is unexpected"]),
    ("llama", {BIAS: torch.zeros(8)}, [f"{BIAS} is unexpected"]),
    ("llama", {Q_NORM: torch.zeros(4)}, [f"{Q_NORM} is unexpected"]),
    ("llama", {NORM: torch.zeros(31)}, [f"{NORM} has shape (31,), not (32,)"]),
    ("llama", {NORM: torch.zeros(32).bfloat16()}, [f"{NORM} is bfloat16, not float32"]),
    (
        "llama",
        {NORM: None, "extra": torch.zeros(2, dtype=torch.int8), QUERY: torch.zeros(1)},
        [
            f"{NORM} is missing",
            "extra is unexpected",
            f"{QUERY} has shape (1,), not (32, 32)",
            "extra is int8, not float32",
        ],
    ),
    ("qwen2", {BIAS: None}, [f"{BIAS} is missing"]),
    ("qwen2", {LAST_BIAS: torch.zeros(32)}, [f"{LAST_BIAS} is unexpected"]),
    ("qwen3", {Q_NORM: None}, [f"{Q_NORM} is missing"]),
    ("qwen3", {Q_NORM: torch.zeros(48)}, [f"{Q_NORM} has shape (48,), not (6,)"]),
    ("mixtral", {EXPERT: None}, [f"{EXPERT} is missing"]),
    ("mixtral", {ROUTER: None}, [f"{ROUTER} is missing"]),
    ("mixtral", {f"{EXPERTS}.4.w1.weight": torch.zeros(48, 32)}, [f"{EXPERTS}.4.w1.weight is unexpected"]),
    ("mixtral", {EXPERT: torch.zeros(32, 48)}, [f"{EXPERT} has shape (32, 48), not (48, 32)"]),
    ("mixtral", {EXPERT: torch.zeros(48, 32).half()}, [f"{EXPERT} is float16, not float32"]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "problems"), MISFITS)
def test_T21_tensors_that_do_not_fit_are_all_named(
    tmp_path: Path, family: str, changes: dict[str, torch.Tensor | None], problems: list[str]
) -> None:
    folder = hub.save(tmp_path / "hub", **hub.MODELS[family])
    hub.change(folder, changes)
    for attempt in (huggingface.read, lambda uri: huggingface.import_(uri, str(tmp_path), "job")):
        with pytest.raises(Refused) as caught:
            attempt(str(folder))
        assert str(caught.value) == f"{folder}: {'; '.join(problems)}"
    assert not (tmp_path / "job").exists()


def test_T21_stacked_experts_of_another_size_are_named(tmp_path: Path) -> None:
    folder = hub.save(tmp_path / "hub", stacked=True, **hub.MODELS["mixtral"])
    name = "model.layers.1.mlp.experts.gate_up_proj"
    hub.change(folder, {name: torch.zeros(4, 48, 32), EXPERT: torch.zeros(48, 32)})
    with pytest.raises(Refused) as caught:
        huggingface.read(str(folder))
    expected = f"{EXPERT} is unexpected; {name} has shape (4, 48, 32), not (4, 96, 32)"
    assert str(caught.value) == f"{folder}: {expected}"


def test_T21_a_head_that_is_not_its_embedding_is_refused(tmp_path: Path) -> None:
    folder = hub.save(tmp_path / "hub", tie_word_embeddings=True)
    embedding = hub.tensors(folder)["model.embed_tokens.weight"]
    hub.change(folder, {"lm_head.weight": embedding.clone()})
    spec, weights = huggingface.read(str(folder))
    assert spec.tied_embedding
    assert "head.weight" not in weights
    hub.change(folder, {"lm_head.weight": embedding + 1})
    with pytest.raises(Refused, match=r"lm_head\.weight is unexpected"):
        huggingface.read(str(folder))


def test_T21_another_dtype_than_asked_is_refused(tmp_path: Path) -> None:
    folder = hub.save(tmp_path / "hub")
    with pytest.raises(Refused, match=r"model\.embed_tokens\.weight is float32, not bfloat16; .*, and 20 more"):
        huggingface.read(str(folder), dtype="bfloat16")
    hub.save(folder, dtype=torch.float64)
    with pytest.raises(Refused, match=r"embedding\.weight is float64, which float32 would round"):
        huggingface.import_(str(folder), str(tmp_path), "job")
    assert not manifest.published(Storage.open(str(tmp_path / "job")))


def test_T21_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    folder = hub.save(tmp_path / "hub", size="20KB")
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
    (tmp_path / "config.json").write_text(json.dumps(hub.CONFIG | {"model_type": "llama"}))
    with pytest.raises(Refused, match=r"there is neither model\.safetensors nor model\.safetensors\.index\.json"):
        huggingface.read(str(tmp_path))


def test_nothing_is_written_over(tmp_path: Path) -> None:
    folder = hub.save(tmp_path / "hub")
    document = huggingface.import_(str(folder), str(tmp_path), "job")
    with pytest.raises(Refused, match=r"the job has checkpoints already, the newest manifests/0000000000-000000\.json"):
        huggingface.import_(str(folder), str(tmp_path), "job")
    with pytest.raises(Refused, match="the folder is not empty"):
        hub.exported(tmp_path, document, folder)


def test_values_too_large_for_a_dtype_are_not_exported(tmp_path: Path) -> None:
    folder = hub.save(tmp_path / "hub")
    hub.change(folder, {NORM: torch.full((32,), 1e6)})
    document = huggingface.import_(str(folder), str(tmp_path), "job")
    with pytest.raises(Refused, match=r"norm\.weight has values that are too large for float16"):
        hub.exported(tmp_path, document, tmp_path / "half", dtype="float16")


def test_a_checkpoint_of_another_model_is_not_exported(tmp_path: Path) -> None:
    document = huggingface.import_(str(hub.save(tmp_path / "hub")), str(tmp_path), "job")
    tied = dataclasses.replace(document, model={**document.model, "tied_embedding": True})
    with pytest.raises(Refused, match=r"manifests/0000000000-000000\.json: head\.weight is unexpected"):
        hub.exported(tmp_path, tied, tmp_path / "again")
    own = dataclasses.replace(document, model={**document.model, "family": "mine:Model", "norm": "layer"})
    with pytest.raises(families.Unsupported, match="has family 'mine:Model'; norm 'layer'"):
        hub.exported(tmp_path, own, tmp_path / "again")


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
