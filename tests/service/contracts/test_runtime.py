from __future__ import annotations

from typing import Any

import pytest

from service.contracts.errors import UserError
from service.contracts.job import parse_job
from service.contracts.runtime import Runtime

JOB: dict[str, Any] = {
    "model": {"layers": 2, "hidden": 32, "heads": 4, "seq_len": 16},
    "data": {},
    "train": {"steps": 1, "global_batch": 4},
    "resources": {"device": "cpu", "slots": 2},
}


def test_nothing_is_brought_along_unless_it_is_said() -> None:
    assert parse_job(JOB).runtime == Runtime()


@pytest.mark.parametrize("reference", ["env:HF_TOKEN", "file:/etc/keys/hf", "kubernetes:hf-token/token"])
def test_a_secret_is_a_reference(reference: str) -> None:
    assert parse_job({**JOB, "runtime": {"secrets": {"HF_TOKEN": reference}}}).runtime.secrets == {
        "HF_TOKEN": reference
    }


@pytest.mark.parametrize(
    ("runtime", "says"),
    [
        ({"secrets": {"HF_TOKEN": "hf_abcdefgh"}}, "runtime.secrets.HF_TOKEN"),
        ({"secrets": {"HF_TOKEN": "env:"}}, "runtime.secrets.HF_TOKEN"),
        ({"secrets": {"HF_TOKEN": "file:relative"}}, "runtime.secrets.HF_TOKEN"),
        ({"secrets": {"HF_TOKEN": "kubernetes:only-a-name"}}, "runtime.secrets.HF_TOKEN"),
        ({"secrets": {"HF_TOKEN": "file:/etc/keys/../shadow"}}, "'..'"),
        ({"secrets": {"HF_TOKEN": "kubernetes:a/.."}}, "'..'"),
        ({"secrets": {"A-B": "env:X"}}, "runtime.secrets"),
        ({"env": {"HF_TOKEN": "hf_abcdefgh"}}, "env.HF_TOKEN looks like a secret"),
        ({"env": {"db_password": "x"}}, "env.db_password looks like a secret"),
        ({"env": {"A": "x"}, "secrets": {"A": "env:X"}}, "A stands in env and in secrets"),
        ({"env": {"A": 1}}, "runtime.env.A"),
        ({"env": {"A": "a\0b"}}, "runtime.env.A"),
        ({"working_dir": ""}, "runtime.working_dir"),
        ({"digest": "abc"}, "runtime.digest"),
        ({"image": "x"}, "unknown field 'image' in runtime; known fields: digest, env, secrets, working_dir"),
    ],
)
def test_what_is_refused(runtime: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_job({**JOB, "runtime": runtime})
    assert says in refused.value.message
    assert "hf_abcdefgh" not in refused.value.message or "secrets" in says
