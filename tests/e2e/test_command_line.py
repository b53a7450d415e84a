"""`phalanx up`, `down` and `demo` as a person runs them, from nothing to nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from service import roster
from tests.e2e.world import until

pytestmark = [pytest.mark.ray, pytest.mark.torch]

PHALANX = Path(sys.executable).with_name("phalanx")


def run(home: Path, *arguments: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PHALANX_HOME": str(home)}
    return subprocess.run(
        [PHALANX, *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def of_home(home: Path) -> list[int]:
    """Pids of all processes that were started for this home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PHALANX_HOME", "").startswith(str(home)) and process.status() != "zombie":
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_demo_recovers_and_leaves_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "demo", "--json", "--steps", "12", timeout_s=180)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["phase"] == "succeeded"
    assert summary["steps"] == len(summary["losses"]) == 12
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["layout"]["dp"] == summary["layout"]["pp"] == summary["layout"]["tp"] == 2
    (incident,) = summary["incidents"]
    assert incident["cause"] == "infrastructure"
    assert incident["recover_s"] > incident["detect_s"] > 0
    assert incident["steps_redone"] >= 0
    assert 0 < summary["goodput"] < 1
    assert list(Path(summary["storage"]).glob("manifests/*.json"))
    assert "SIGKILL to rank" in done.stderr
    until(lambda: not of_home(tmp_path), "end of all processes of the demo", 5)


def test_up_stays_until_down_also_when_it_was_killed(tmp_path: Path) -> None:
    up = subprocess.Popen(
        [PHALANX, "up", "--racks", "1", "--nodes", "1", "--api-port", "0"],
        env={**os.environ, "PHALANX_HOME": str(tmp_path)}, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert up.stdout is not None
        assert "starting 1 nodes" in up.stdout.readline()
        assert "ready" in up.stdout.readline()
        assert "n0" in run(tmp_path, "nodes").stdout
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
        second = run(tmp_path, "up", "--api-port", "0")
        assert second.returncode == 1
        assert "phalanx down" in second.stderr

        up.send_signal(signal.SIGKILL)
        up.wait()
        assert roster.running(tmp_path)
        assert "ended" in run(tmp_path, "down", timeout_s=60).stdout
        until(lambda: not of_home(tmp_path), "end of all processes of the fleet", 5)
        assert "nothing runs" in run(tmp_path, "down").stdout
    finally:
        up.stdout.close()  # type: ignore[union-attr]
        roster.down(tmp_path)
        up.wait()
