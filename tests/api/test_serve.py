"""`python -m api` as a process: its files, its address, its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from api.client import Client
from service.contracts.job import Phase
from service.store.jobs import Store
from service.store.records import Changes, JobUpdate
from tests.api.world import job, until

pytestmark = pytest.mark.server


def start(home: Path, port: int = 0) -> subprocess.Popen[bytes]:
    environ = {
        **os.environ,
        "PHALANX_HOME": str(home),
        "PHALANX_MODELS": "mine.models",
    }
    with (home.parent / "api.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "api", "--port", str(port)], env=environ, stderr=log)


def test_a_process_serves_ends_its_streams_and_comes_back(tmp_path: Path) -> None:
    home = tmp_path / "home"
    process = start(home)
    try:
        until((home / "api.json").exists, 30)
        with Client.find(home) as client:
            made = client.submit(job({"model.family": "mine.models:Model"}))
            stream = client.events(made.uid, follow=True)
            assert next(stream).type == "JobSubmitted"

            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0

            process = start(home, int(client.url.rpartition(":")[2]))
            store = Store.open(f"sqlite:///{home}/store.sqlite3")
            epoch = store.acquire("test", 60)
            assert epoch is not None
            over = JobUpdate(made.uid, Phase.SUCCEEDED.value, "", made.status.model_dump(mode="json"), {}, 2.0)
            store.commit(epoch, Changes(jobs=[over], events=[(made.uid, 2.0, "JobEnded", "", {})]))
            store.close()
            assert [event.type for event in stream] == ["JobEnded"]
    finally:
        process.terminate()
        process.wait(10)
    lines = [json.loads(line) for line in (tmp_path / "api.log").read_text().splitlines()]
    assert {"started", "request", "stopped"} <= {line["message"] for line in lines}
    assert not [line for line in lines if line["level"] in ("error", "critical")]


def test_a_wrong_setting_is_one_clear_line(tmp_path: Path) -> None:
    environ = {**os.environ, "PHALANX_HOME": str(tmp_path), "PHALANX_API_PORT": "http"}
    done = subprocess.run([sys.executable, "-m", "api"], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("phalanx api: PHALANX_API_PORT")
    assert len(done.stderr.splitlines()) == 1
