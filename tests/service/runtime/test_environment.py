from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from service.contracts.errors import ClusterError
from service.contracts.runtime import Runtime
from service.runtime import own_code, references
from service.runtime.environment import Environment
from service.runtime.own_code import NoCode
from service.runtime.redaction import HIDDEN, Redaction
from workers.reports import Failed, Finished

SECRET = "hf_very-secret"


def archive(place: Path, **files: str) -> tuple[str, str]:
    """(its path, its digest)"""
    path = place / "code.zip"
    with zipfile.ZipFile(path, "w") as made:
        for name, text in files.items():
            made.writestr(name.replace("__", "/") + ".py", text)
    return str(path), hashlib.sha256(path.read_bytes()).hexdigest()


def test_where_a_secret_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_NODE", SECRET)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(f"{SECRET}\n")
    assert references.value("env:OF_THE_NODE") == SECRET
    assert references.value(f"file:{tmp_path}/hf/token") == SECRET
    assert references.value("kubernetes:hf/token", tmp_path) == SECRET


@pytest.mark.parametrize("reference", ["env:NOT_THERE", "file:/no/such/file", "file:/", "kubernetes:a/b"])
def test_one_that_is_not_there_is_named(reference: str) -> None:
    with pytest.raises(ClusterError, match=reference):
        references.value(reference)


def test_an_empty_file_and_one_that_is_no_text_are_none(tmp_path: Path) -> None:
    for content in (b"\n", b"\xff\xfe"):
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(ClusterError):
            references.value(f"file:{tmp_path}/key")


def test_a_secret_is_taken_out_of_texts_whole_and_line_by_line() -> None:
    redaction = Redaction([SECRET, "-----BEGIN\nabcdefgh\nshort"])
    assert redaction.text(f"a={SECRET}, b={SECRET}!") == f"a={HIDDEN}, b={HIDDEN}!"
    assert redaction.text("abcdefgh short") == f"{HIDDEN} short"


def test_the_longer_of_two_that_overlap_is_taken_out_whole() -> None:
    assert Redaction(["secret-a", "secret-a-and-b"]).text("x secret-a-and-b") == f"x {HIDDEN}"


def test_reports_are_told_without_it() -> None:
    redaction = Redaction([SECRET])
    told = redaction.report(Failed(1, "user", 3, f"no {SECRET}", f"Traceback {SECRET}"))
    assert told == Failed(1, "user", 3, f"no {HIDDEN}", f"Traceback {HIDDEN}")
    assert redaction.report(Finished(1, 3)) == Finished(1, 3)


def test_an_archive_is_unpacked_once(tmp_path: Path) -> None:
    uri, digest = archive(tmp_path, mine__model="NAME = 'mine'")
    place = own_code.unpacked(uri, digest, tmp_path / "code")
    (place / "mark").touch()
    assert own_code.unpacked(uri, digest, tmp_path / "code") == place
    assert (place / "mark").exists()
    assert [one.name for one in (tmp_path / "code").iterdir()] == [digest]


def test_another_archive_than_the_one_that_was_submitted_is_refused(tmp_path: Path) -> None:
    uri, _ = archive(tmp_path, mine="1")
    with pytest.raises(NoCode, match="is not what it was"):
        own_code.unpacked(uri, "0" * 64, tmp_path / "code")
    assert list((tmp_path / "code").iterdir()) == []


def test_an_archive_leads_no_name_out_of_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "code.zip"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("../../out.py", "x")
        made.writestr("/abs.py", "x")
    place = own_code.unpacked(str(path), hashlib.sha256(path.read_bytes()).hexdigest(), tmp_path / "a" / "b" / "code")
    assert sorted(one.name for one in place.iterdir()) == ["abs.py", "out.py"]
    assert not list(tmp_path.rglob("out.py"))[1:]


def test_what_a_process_has(tmp_path: Path) -> None:
    """In a process of its own: it changes its folder, its variables and its path."""
    uri, digest = archive(tmp_path, mine__model="NAME = 'mine'")
    program = """
import os, sys
from pathlib import Path
from service.contracts.runtime import Runtime
from service.runtime.environment import Environment
from service.runtime.own_code import NoCode
uri, digest, scratch = sys.argv[1:]
made = Environment()
runtime = Runtime(env={"A": "b"}, secrets={"HF_TOKEN": "env:OF_THE_NODE"}, working_dir=uri, digest=digest)
assert made.enter(runtime, Path(scratch)) is None
import mine.model
print(mine.model.NAME, os.environ["A"], os.environ["HF_TOKEN"], Path("mine/model.py").exists())
print(made.redaction.text("it is " + os.environ["HF_TOKEN"]))
"""
    environ = {**os.environ, "OF_THE_NODE": SECRET}
    command = [sys.executable, "-c", program, uri, digest, str(tmp_path / "scratch")]
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout
    assert told == f"mine b {SECRET} True\nit is {HIDDEN}\n"


def test_what_can_t_be_had_is_told_later(tmp_path: Path) -> None:
    unfit = Environment().enter(Runtime(secrets={"HF_TOKEN": "env:NOT_THERE"}), tmp_path)
    assert isinstance(unfit, ClusterError)
    unfit = Environment().enter(Runtime(working_dir=f"{tmp_path}/no.zip", digest="0" * 64), tmp_path)
    assert isinstance(unfit, FileNotFoundError)
