"""`phalanx data`: prepare, verify, show, and what they say of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from api import checks
from service.contracts.errors import UserError
from service.contracts.job import parse_job
from tests.api.commands import Run
from tests.api.world import job


def prepared(run: Run, place: Path) -> Path:
    (place / "a.jsonl").write_text("\n".join(json.dumps({"text": f"text {n}"}) for n in range(20)))
    done = run("data", "prepare", f"{place}/*.jsonl", "--to", f"{place}/made")
    assert done.exit_code == 0, done.output
    assert f"{place}/made: 150 tokens of 20 documents in 1 shards\n" in done.stdout
    return place / "made"


def test_prepare_verify_and_show(run: Run, tmp_path: Path) -> None:
    made = prepared(run, tmp_path)
    assert run("data", "verify", str(made)).stdout == f"{made}: 1 shards, all as they were written\n"
    told = run("data", "show", str(made)).stdout
    for part in ("150 of 20 documents", "byte, 257 ids", "uint16", "00000-00000"):
        assert part in told


def test_a_damaged_shard_is_named(run: Run, tmp_path: Path) -> None:
    made = prepared(run, tmp_path)
    file = made / "00000-00000.bin"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    told = run("data", "verify", str(made))
    assert told.exit_code == 2
    assert "00000-00000.bin is not what was written" in told.stdout
    assert "into another folder" in told.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("prepare", "{place}/none.jsonl", "--to", "{place}/out"), "none.jsonl"),
        (("prepare", "{place}/*.none", "--to", "{place}/out"), "matches no file"),
        (("prepare", "{place}/bad.jsonl", "--to", "{place}/out"), "bad.jsonl:1 is not JSON"),
        (("prepare", "{place}/bad.jsonl", "--to", "{place}/out", "--tokenizer", "{place}/no.json"), "no.json"),
        (("verify", "{place}"), "is not there: make it by `phalanx data prepare`"),
        (("show", "{place}"), "is not there"),
    ],
)
def test_what_can_t_be_done(run: Run, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    done = run("data", *(word.format(place=tmp_path) for word in words))
    assert done.exit_code == 2
    assert says in done.output


def test_a_job_may_name_prepared_text_and_a_mixture(run: Run, tmp_path: Path) -> None:
    made = prepared(run, tmp_path)
    checks.data(str(made))
    checks.data(f"file://{made}/")
    with pytest.raises(UserError, match="matches no file"):
        checks.data(str(tmp_path))
    sources = [{"source": str(made), "weight": 2}, {"source": f"{tmp_path}/a.jsonl"}]
    checks.submission(parse_job(job({"data": {"sources": sources}})), [], ["/srv/runs"])
    sources.append({"source": f"{tmp_path}/none.jsonl"})
    with pytest.raises(UserError, match=r"none.jsonl matches no file") as refused:
        checks.submission(parse_job(job({"data": {"sources": sources}})), [], ["/srv/runs"])
    assert refused.value.field == "data.sources.2.source"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"source": "/a.txt", "sources": [{"source": "/b.txt"}]}, "put source into sources"),
        ({"sources": [{"source": "/b.txt"}, {"source": "/b.txt"}]}, "names /b.txt twice"),
        ({"sources": []}, "data.sources"),
        ({"sources": [{"source": "/b.txt", "weight": 0}]}, "data.sources.0.weight"),
        ({"sources": [None]}, "data.sources.0 should be a mapping of fields (source, text_field, weight), not None"),
        ({"sources": [{"source": "/b.txt", "text": 1}]}, "known fields: source, text_field, weight"),
        ({"sources": [{}]}, "field 'data.sources.0.source' is required"),
    ],
)
def test_a_mixture_that_is_none(data: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_job(job({"data": data}))
    assert says in refused.value.message
