"""What is refused at the door, and what would work instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from api import checks
from service.contracts import errors
from service.contracts.job import parse_job
from service.store.records import NodeRow
from tests.api.world import job

ROOTS = ("/srv/runs", "s3://bucket/runs")


@pytest.mark.parametrize(
    "root",
    [
        None,
        "/srv/runs",
        "/srv/runs/",
        "/srv/runs/mine",
        "file:///srv/runs/a",
        "s3://bucket/runs/a",
        "s3a://bucket/runs",
    ],
)
def test_roots_that_are_allowed(root: str | None) -> None:
    checks.checkpoint_root(root, ROOTS)


@pytest.mark.parametrize(
    ("root", "says"),
    [
        ("/etc", "not under a storage root"),
        ("/srv/runs-of-others", "not under a storage root"),
        ("/srv", "not under a storage root"),
        ("s3://bucket/runs-of-others", "not under a storage root"),
        ("s3://other/runs", "not under a storage root"),
        ("/srv/runs/../../etc", "'..'"),
        ("s3://bucket/runs/../x", "'..'"),
        ("runs", "relative path"),
        ("~/runs", "relative path"),
        ("", "relative path"),
        ("http://host/runs", "can't be used"),
        ("ftp://host/runs", "can't be used"),
        ("memory://runs", "can't be used"),
        ("zip://a::file:///srv/runs", "can't be used"),
    ],
)
def test_roots_that_are_refused(root: str, says: str) -> None:
    with pytest.raises(errors.UserError) as refused:
        checks.checkpoint_root(root, ROOTS)
    assert says in refused.value.message
    assert refused.value.field == "checkpoint.root"
    assert refused.value.hint


def test_a_link_does_not_lead_out_of_a_root(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "out").symlink_to("/etc")
    with pytest.raises(errors.UserError, match="not under"):
        checks.checkpoint_root(str(tmp_path / "runs" / "out"), [str(tmp_path / "runs")])


MODELS = ("mine", "theirs.models")


@pytest.mark.parametrize(
    ("family", "allowed"),
    [
        ("llama", ()),
        ("llama", MODELS),
        ("mine:Model", MODELS),
        ("mine.models.wide:Model", MODELS),
        ("theirs.models:Model", MODELS),
        ("theirs.models.wide:Model", MODELS),
    ],
)
def test_models_that_are_allowed(family: str, allowed: tuple[str, ...]) -> None:
    checks.model(family, allowed)


@pytest.mark.parametrize(
    ("family", "allowed", "works"),
    [
        ("mine:Model", (), "only llama is allowed here"),
        ("mines:Model", MODELS, "use llama, or a class under mine or theirs.models"),
        ("mine_too.models:Model", MODELS, "under mine or theirs.models"),
        ("theirs:Model", MODELS, "under mine or theirs.models"),
        ("theirs.models_too:Model", MODELS, "under mine or theirs.models"),
        ("os:system", MODELS, "under mine or theirs.models"),
        ("llama.mine:Model", MODELS, "under mine or theirs.models"),
    ],
)
def test_models_that_are_refused(family: str, allowed: tuple[str, ...], works: str) -> None:
    with pytest.raises(errors.UserError, match=f"model.family: .* no model from {family.partition(':')[0]}") as refused:
        checks.model(family, allowed)
    assert refused.value.field == "model.family"
    assert works in refused.value.hint
    assert "PHALANX_MODELS" in refused.value.hint


def test_data_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    for source in (
        "builtin:topics",
        f"{tmp_path}/a.jsonl",
        f"{tmp_path}/*.jsonl",
        f"file://{tmp_path}/a.jsonl",
    ):
        checks.data(source)
    checks.tokenizer("byte")
    checks.tokenizer(f"{tmp_path}/a.jsonl")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("builtin:poems", "builtin:topics"),
        ("/no/such/file.txt", "matches no file"),
        ("/no/such/*.txt", "matches no file"),
        ("/etc", "matches no file"),
        ("corpus.txt", "relative path"),
        ("http://host/corpus.txt", "can't be used"),
        ("gs://bucket/corpus.txt", "can't be read from the API"),
    ],
)
def test_data_that_is_not_there(source: str, says: str) -> None:
    with pytest.raises(errors.UserError) as refused:
        checks.data(source)
    assert says in refused.value.message
    assert refused.value.field == "data.source"
    assert refused.value.hint or "builtin:topics" in refused.value.message


@pytest.mark.parametrize(
    ("source", "says"),
    [("/no/such/file.txt", "matches no file"), ("corpus.txt", "relative path"), ("http://host/x", "can't be used")],
)
def test_data_to_evaluate_on_has_the_same_rules(source: str, says: str) -> None:
    with pytest.raises(errors.UserError, match=says) as refused:
        checks.submission(parse_job(job({"eval": {"data": [{"source": source}]}})), [], ["/srv/runs"])
    assert refused.value.field == "eval.data.0.source"
    checks.submission(parse_job(job({"eval": {"data": [{"source": "builtin:topics"}]}})), [], ["/srv/runs"])


def test_a_tokenizer_that_is_not_there() -> None:
    with pytest.raises(errors.UserError, match="is not there") as refused:
        checks.tokenizer("/no/such/tokenizer.json")
    assert (refused.value.field, "byte" in refused.value.hint) == ("data.tokenizer", True)


def test_a_job_that_could_never_fit_is_refused_and_an_unseen_fleet_refuses_nothing() -> None:
    spec = parse_job(job({"resources.slots": 8}))
    node = NodeRow("id1", "n1", 4, "", "", "cpu", "127.0.0.1", 1.0)
    checks.submission(spec, [], ["/srv/runs"])
    with pytest.raises(errors.UserError, match="needs 8 cpu slots; the fleet has 4") as refused:
        checks.submission(spec, [node], ["/srv/runs"])
    assert refused.value.field == "resources.slots"
