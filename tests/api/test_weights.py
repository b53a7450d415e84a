"""A job that begins with the weights of a folder: what of it is seen before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.contracts.errors import UserError
from service.contracts.job import parse_job
from tests.api.world import GONE, World, job

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 192, "vocab_size": 300, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
MODEL = {"model.ffn_hidden": 192, "model.vocab_size": 300}


def folder(place: Path, **changes: Any) -> str:
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(place)


def test_a_folder_whose_model_is_the_jobs(world: World, tmp_path: Path) -> None:
    uri = folder(tmp_path / "hub")
    view = world.submit({**MODEL, "init_from": {"huggingface": uri}})
    assert view.spec["init_from"]["huggingface"] == uri
    assert world.store.events(view.uid, 0)[0].reason.endswith(f", to begin at {uri}")
    larger = {**MODEL, "model.vocab_size": 384, "init_from": {"huggingface": f"file://{uri}"}}
    assert world.submit(larger).spec["init_from"]["job"] is None


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        ({"hidden_size": 128}, {}, "hidden is 128 there, not 64"),
        ({"num_hidden_layers": 2}, {}, "layers is 2 there, not 4"),
        ({"vocab_size": 301}, {}, "301 rows there, and 300 here"),
        ({}, {"model.vocab_size": GONE}, "and 0 here: set model.vocab_size"),
        ({"model_type": "gpt2"}, {}, "model_type 'gpt2'"),
    ],
)
def test_another_model_is_refused(
    world: World, tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any], says: str
) -> None:
    uri = folder(tmp_path / "hub", **theirs)
    changes = {name: value for name, value in {**MODEL, **ours}.items() if value is not GONE}
    with pytest.raises(UserError) as refused:
        world.submit({**changes, "init_from": {"huggingface": uri}})
    assert says in refused.value.message
    assert refused.value.field == "init_from.huggingface"


@pytest.mark.parametrize("uri", ["/no/such/folder", "http://169.254.169.254/", "relative"])
def test_what_is_no_folder_is_refused(world: World, uri: str) -> None:
    with pytest.raises(UserError, match=r"init_from\.huggingface"):
        world.submit({**MODEL, "init_from": {"huggingface": uri}})


@pytest.mark.parametrize(
    "start",
    [{}, {"job": "a-00000000", "huggingface": "/a"}, {"huggingface": "/a", "step": 3}],
)
def test_a_job_begins_at_one_of_both(start: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="init_from"):
        parse_job(job({"init_from": start}))
