"""`phalanx up`, `down` and `demo` as a person runs them, from nothing to nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from api.client import Client
from service import roster
from service.contracts.job import Phase
from tests.e2e.world import JOB, until

pytestmark = [pytest.mark.ray, pytest.mark.torch]

PHALANX = Path(sys.executable).with_name("phalanx")


def environment(home: Path) -> dict[str, str]:
    """A person's: nothing of the session's fleet."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
    return {**own, "PHALANX_HOME": str(home)}


def run(home: Path, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PHALANX, *arguments], env=environment(home), capture_output=True, text=True, timeout=timeout_s, check=False
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
    done = run(tmp_path, "demo", "--json", "--steps", "12", timeout_s=400)
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
        env=environment(tmp_path), stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert up.stdout is not None
        assert "starting 1 nodes" in up.stdout.readline()
        assert "ready" in up.stdout.readline()
        assert "n0" in run(tmp_path, "nodes").stdout
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
        second = run(tmp_path, "up", "--api-port", "0")
        assert second.returncode == 2
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


def test_down_in_mid_run_and_up_again(tmp_path: Path) -> None:
    """Down does not wait for the job; the job waits for up, and goes on at its checkpoint."""
    one = {"parallel": {"dp": 1, "pp": 1, "tp": 1}, "resources": {"device": "cpu", "slots": 1}}
    job = {**JOB, **one, "train": {**JOB["train"], "steps": 100_000}, "checkpoint": {"every_steps": 20}}
    uid = ""
    for attempt in (1, 2):
        up = subprocess.Popen(
            [PHALANX, "up", "--racks", "1", "--nodes", "1", "--slots", "1", "--api-port", "0"],
            env=environment(tmp_path), stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            assert up.stdout is not None
            assert any("ready" in line for line in up.stdout)
            with Client.find(tmp_path) as client:
                uid = uid or client.submit(job).uid
                until(lambda: client.get(uid).phase is Phase.RUNNING, "running job")  # noqa: B023
                saved = until(lambda: client.get(uid).status.checkpoint_step, "checkpoint")  # noqa: B023
                view = client.get(uid)
                resumed = [event.reason for event in client.events(uid) if event.type == "GangResumed"]
            assert view.status.attempt == attempt
            assert len(resumed) == attempt
            assert ("from the seed" in resumed[-1]) == (attempt == 1)
            assert saved
            began = time.monotonic()
            assert "ended" in run(tmp_path, "down", timeout_s=60).stdout
            assert time.monotonic() - began < 15
            assert up.wait(10) == 0
            until(lambda: not of_home(tmp_path), "end of all processes of the fleet", 5)
        finally:
            up.stdout.close()  # type: ignore[union-attr]
            roster.down(tmp_path)
            up.wait()
