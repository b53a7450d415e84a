from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import pytest

from service.contracts.errors import UserError
from service.core import liveness
from service.settings import Settings

HOME = {"PHALANX_HOME": "/srv/phalanx"}


def test_defaults() -> None:
    home = Path.home() / ".phalanx"
    assert Settings.read({}) == Settings(
        home=home,
        store=f"sqlite:///{home}/store.sqlite3",
        storage=f"{home}/runs",
        api_host="127.0.0.1",
        api_port=7070,
        ray_address="",
        lease_ttl_s=10.0,
        allowed_roots=(f"{home}/runs",),
        scratch=f"{tempfile.gettempdir()}/phalanx-{os.getuid()}",
        snapshots=f"/dev/shm/phalanx-{os.getuid()}",
    )


def test_the_process_is_read_when_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_API_PORT", "8080")
    assert Settings.read().api_port == 8080


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("PHALANX_HOME", "/data", "store", "sqlite:////data/store.sqlite3"),
        ("PHALANX_HOME", "/data", "storage", "/data/runs"),
        ("PHALANX_HOME", " ", "home", Path.home() / ".phalanx"),
        ("PHALANX_STORE", "postgresql://u:p@host/name", "store", "postgresql://u:p@host/name"),
        ("PHALANX_STORAGE", "s3://bucket/runs/", "storage", "s3://bucket/runs"),
        ("PHALANX_STORAGE", "file:///data/runs", "storage", "/data/runs"),
        ("PHALANX_STORAGE", "~/runs", "storage", str(Path.home() / "runs")),
        ("PHALANX_API_HOST", "0.0.0.0", "api_host", "0.0.0.0"),
        ("PHALANX_API_PORT", " 80 ", "api_port", 80),
        ("PHALANX_SCRATCH", "/scratch/phalanx", "scratch", "/scratch/phalanx"),
        ("PHALANX_RAY_ADDRESS", "10.0.0.1:6379", "ray_address", "10.0.0.1:6379"),
        ("PHALANX_LEASE_TTL_S", "2.5", "lease_ttl_s", 2.5),
        (
            "PHALANX_ALLOWED_ROOTS",
            "s3://a/b, /data,",
            "allowed_roots",
            ("/srv/phalanx/runs", "s3://a/b", "/data"),
        ),
        ("PHALANX_SNAPSHOTS", "/mnt/memory", "snapshots", "/mnt/memory"),
        ("PHALANX_SNAPSHOT_BYTES", "8589934592", "snapshot_bytes", 1 << 33),
        ("PHALANX_MODELS", "mine, theirs.models,,mine", "models", ("mine", "theirs.models")),
        ("PHALANX_MODELS", " , ", "models", ()),
        ("PHALANX_OWN_CODE", "vision, speech", "own_code", ("vision", "speech")),
        (
            "PHALANX_SECRETS",
            "env:HF_TOKEN,kubernetes:{project}-*",
            "secrets",
            ("env:HF_TOKEN", "kubernetes:{project}-*"),
        ),
        ("PHALANX_ALLOWED_ROOTS", "/srv/phalanx/runs", "allowed_roots", ("/srv/phalanx/runs",)),
    ],
)
def test_a_variable_sets_its_field(variable: str, text: str, field: str, value: object) -> None:
    assert getattr(Settings.read(HOME | {variable: text}), field) == value


@pytest.mark.parametrize(
    ("variable", "text", "hint"),
    [
        ("PHALANX_HOME", "phalanx", "/phalanx"),
        ("PHALANX_HOME", "~nobody-of-this-name/x", "absolute path"),
        ("PHALANX_STORE", "sqlite://", "sqlite:////"),
        ("PHALANX_STORE", "sqlite:///store.sqlite3", "/store.sqlite3"),
        ("PHALANX_STORE", "mysql://host/name", "postgresql://"),
        ("PHALANX_STORAGE", "runs", "/runs"),
        ("PHALANX_STORAGE", "s3://", "s3://bucket/runs"),
        ("PHALANX_ALLOWED_ROOTS", "/data,runs", "/runs"),
        ("PHALANX_SCRATCH", "scratch", "/scratch"),
        ("PHALANX_SNAPSHOTS", "memory", "/memory"),
        ("PHALANX_SNAPSHOT_BYTES", "8 GiB", "8589934592"),
        ("PHALANX_SNAPSHOT_BYTES", "-1", "8589934592"),
        ("PHALANX_MODELS", "mine,their-models", "my_package.models"),
        ("PHALANX_MODELS", "mine.models:Model", "my_package.models"),
        ("PHALANX_MODELS", "mine.", "my_package.models"),
        ("PHALANX_MODELS", "*", "my_package.models"),
        ("PHALANX_SECRETS", "HF_TOKEN", "env:HF_TOKEN"),
        ("PHALANX_SECRETS", "env:", "env:HF_TOKEN"),
        ("PHALANX_API_HOST", "http://host", "127.0.0.1"),
        ("PHALANX_API_PORT", "seven", "1 to 65535"),
        ("PHALANX_API_PORT", "0", "1 to 65535"),
        ("PHALANX_API_PORT", "65536", "1 to 65535"),
        ("PHALANX_LEASE_TTL_S", "soon", "seconds above 0"),
        ("PHALANX_LEASE_TTL_S", "0", "seconds above 0"),
        ("PHALANX_LEASE_TTL_S", "inf", "seconds above 0"),
        ("PHALANX_LEASE_TTL_S", "nan", "seconds above 0"),
    ],
)
def test_a_wrong_value_names_its_variable_and_what_would_work(variable: str, text: str, hint: str) -> None:
    with pytest.raises(UserError, match=variable) as refused:
        Settings.read(HOME | {variable: text})
    assert refused.value.field == variable
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("root", "allowed"),
    [
        ("/srv/phalanx/runs", True),
        ("/srv/phalanx/runs/", True),
        ("file:///srv/phalanx/runs/mine", True),
        ("s3://bucket/runs/mine", True),
        ("s3://bucket/runs", True),
        ("/srv/phalanx/runs-of-others", False),
        ("/srv/phalanx", False),
        ("/srv/phalanx/runs/../../etc", False),
        ("s3://bucket/runs/../x", False),
        ("s3://bucket", False),
        ("s3://bucket-of-others/runs", False),
        ("gs://bucket/runs", False),
        ("runs", False),
        ("filecache::s3://bucket/runs", False),
    ],
)
def test_where_a_job_may_keep_its_checkpoints(root: str, allowed: bool) -> None:
    assert Settings.read(HOME | {"PHALANX_ALLOWED_ROOTS": "s3://bucket/runs"}).allows(root) == allowed


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("", {}),
        ("step_s=5", {"step_s": 5.0}),
        (" step_s = 5 , saving_s=0.5,", {"step_s": 5.0, "saving_s": 0.5}),
    ],
)
def test_limits_are_changed_by_name(text: str, changes: dict[str, float]) -> None:
    assert Settings.read({"PHALANX_LIMITS": text}).limits == dataclasses.replace(liveness.DEFAULT, **changes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stepp_s=5", "there is no limit 'stepp_s'"),
        ("step_s", "'' is no duration"),
        ("step_s=0", "'0' is no duration"),
        ("step_s=soon", "'soon' is no duration"),
    ],
)
def test_limits_that_are_none(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Settings.read({"PHALANX_LIMITS": text})
