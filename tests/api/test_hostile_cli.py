"""A careless hand at the command line: an error of two lines and an exit code, never a traceback."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from api.cli.main import app
from api.client import Client
from service.contracts import errors
from tests.api.world import World, job

pytestmark = pytest.mark.server

PHALANX = Path(sys.executable).with_name("phalanx")


def told(world: World, *words: str, home: Path | None = None) -> tuple[int, str]:
    """Exit code and what was said to stderr, which is short."""
    done = CliRunner().invoke(app, list(words), env={"PHALANX_HOME": str(home or world.home)}, terminal_width=80)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) <= 2
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (bytes(range(256)), "is not text"),
        (b"\0", "neither YAML nor JSON"),
        (b"a: &a [*a]", "alias to itself"),
        (b"a: " + b"[" * 1000 + b"]" * 1000, "can't be read as YAML"),
        (b"a: 2024-99-99", "can't be read as YAML"),
        (b"a: " + b"9" * 5000, "can't be read as YAML"),
        (b"a: 2024-01-01", "can't be JSON"),
        (b"? [a]\n: 1", "neither YAML nor JSON"),
        (b"a: .nan", "field 'model' is required"),
        (b"1: 2", "field 'model' is required"),
    ],
)
def test_files_that_are_no_job(world: World, tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    code, said = told(world, "submit", str(path))
    assert (code, says in said) == (2, True), said


def test_a_folder_is_no_file(world: World, tmp_path: Path) -> None:
    assert told(world, "submit", str(tmp_path))[0] == 2


@pytest.mark.parametrize("uid", ["", "a\nb", "a/../b", "../nodes", "ä", "a?b#c", "x:cancel", "%2e%2e", "." * 5000])
@pytest.mark.parametrize(
    "command",
    [["get"], ["logs"], ["logs", "-f"], ["events", "-f"], ["cancel"], ["checkpoint", "ls"], ["checkpoint", "fork"]],
)
def test_a_uid_that_names_nothing(world: World, command: list[str], uid: str) -> None:
    assert told(world, *command, uid)[0] == 2


@pytest.mark.parametrize(
    "given", ["nonsense", "ftp://x", "http://[::1", "http://127.0.0.1:99999", "http://", "\n", "http://a b"]
)
def test_a_url_of_no_api(world: World, given: str) -> None:
    assert told(world, "--url", given, "list")[0] in (2, 3)


@pytest.mark.parametrize("given", ["ä", "a\nb", "\x7f", "wrong"])
def test_a_token_that_is_none(world: World, given: str) -> None:
    assert told(world, "--token", given, "list")[0] == 2


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}"])
def test_a_home_that_says_no_address(world: World, tmp_path: Path, content: str | None) -> None:
    home = tmp_path / "home"
    if content is None:
        home.write_text("a file")
    else:
        home.mkdir()
        (home / "api.json").write_text(content)
    assert told(world, "list", home=home)[0] == 3


@pytest.fixture
def stranger() -> Iterator[str]:
    """The URL of a server that is no Phalanx."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code = {"/v1/nodes": 302, "/v1/jobs/list": 400}.get(self.path, 200)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(b"[]" if code == 400 else b"<html>hello</html>")

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("words", "code"), [(["get", "x"], 3), (["nodes"], 3), (["get", "list"], 2)])
def test_a_server_that_is_no_phalanx(world: World, stranger: str, words: list[str], code: int) -> None:
    assert told(world, "--url", stranger, *words)[0] == code


def start(world: World, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PHALANX_HOME": str(world.home), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [PHALANX, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("words", [["events"], ["logs"], ["logs", "-f"]])
def test_a_reader_that_has_seen_enough_ends_it_quietly(world: World, words: list[str]) -> None:
    uid = world.submit().uid
    world.say(uid, *["a line that fills the pipe " * 8] * 4000)
    world.log(uid, "logs/000001-n1/000000.jsonl", [(0, "a line that fills the pipe " * 8)] * 4000)
    process = start(world, *words, uid)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    _, said = process.communicate(timeout=20)
    assert said == ""
    assert process.returncode


@pytest.mark.parametrize(
    ("words", "says"), [(["submit", "--follow"], "goes on"), (["logs", "-f"], ""), (["events", "-f"], "")]
)
def test_ctrl_c_while_it_follows(world: World, tmp_path: Path, words: list[str], says: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job()))
    uid = world.submit().uid
    world.log(uid, "logs/000001-n1/000000.jsonl", [(0, "said")])
    process = start(world, *words, str(file) if words[0] == "submit" else uid)
    assert process.stdout is not None
    assert any("said" in line or "JobSubmitted" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert says in said


def test_a_file_as_home_has_no_token(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("a file")
    with pytest.raises(errors.Unauthorized, match="can't be read"):
        Client.find(home, url="http://127.0.0.1:1")
