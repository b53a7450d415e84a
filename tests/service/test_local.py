from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from service import roster
from service.contracts.errors import Conflict, UserError
from service.local import LocalFleet


def test_one_fleet_in_a_home(tmp_path: Path) -> None:
    alive = {"pid": os.getpid(), "started": psutil.Process().create_time()}
    (tmp_path / roster.STATE).write_text(json.dumps({"temp": "", "processes": [alive]}))
    before = dict(os.environ)
    with pytest.raises(Conflict, match=r"a fleet runs in .* already") as refused:
        LocalFleet(tmp_path).start()
    assert "phalanx down" in refused.value.hint
    assert dict(os.environ) == before
    assert [path.name for path in tmp_path.iterdir()] == [roster.STATE]


def test_the_token_of_a_fleet_is_private_and_stays(tmp_path: Path) -> None:
    first, second = (LocalFleet(tmp_path).environment()["RAY_AUTH_TOKEN_PATH"] for _ in range(2))
    assert first == second
    assert stat.S_IMODE(Path(first).stat().st_mode) == 0o600
    assert len(Path(first).read_text()) == 64


def test_a_port_in_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"can't listen on 127.0.0.1:{port}") as refused:
            LocalFleet(tmp_path, api_port=port).start()
    assert "--api-port" in refused.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("a file")
    for place in (home, home / "below"):
        with pytest.raises(UserError, match="can't be the home of a fleet"):
            LocalFleet(place).start()


@pytest.mark.parametrize(
    ("environment", "says"),
    [({"PHALANX_API_PORT": "many"}, "PHALANX_API_PORT"), ({"PHALANX_HOME": "/dev/null"}, "home")],
)
def test_what_is_wrong_is_told_in_two_lines(tmp_path: Path, environment: dict[str, str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service.local"], env={**os.environ, "PHALANX_HOME": str(tmp_path), **environment},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) <= 2
