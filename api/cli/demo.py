"""The main job from nothing to nothing: a fleet, a job over REST, a rank killed half way, a summary, no process left.

A user of the public API like any other; what it kills, it finds in the job's logs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from api.cli import show, tables
from api.client import POLL_S, Client
from api.views import StepView
from service import roster
from service.contracts import errors
from service.contracts.job import Phase
from service.contracts.status import JobView

READY_S = 120.0
VICTIM = 5


def job(steps: int) -> dict[str, Any]:
    """A decoder with 8 query and 2 KV heads on the standard library's documentation, in all three dimensions."""
    return {
        "name": "demo",
        "model": {"layers": 8, "hidden": 128, "heads": 8, "kv_heads": 2, "ffn_hidden": 344, "seq_len": 128},
        "data": {"source": "builtin:topics", "tokenizer": "byte"},
        "train": {
            "steps": steps, "global_batch": 8, "learning_rate": 2e-3, "min_learning_rate": 2e-4,
            "warmup_steps": min(10, steps // 4), "precision": "fp32", "seed": 7,
        },
        "parallel": {"dp": 2, "pp": 2, "tp": 2},
        "resources": {"device": "cpu", "slots": 8},
        "checkpoint": {"every_steps": max(1, steps // 6), "keep": 3},
    }  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    job: JobView
    losses: tuple[float, ...]  # of each step
    seconds: float  # from submission to the end

    @property
    def succeeded(self) -> bool:
        return self.job.phase is Phase.SUCCEEDED

    def as_json(self) -> str:
        view, status = self.job, self.job.status
        fields = ("cause", "kind", "rank", "node", "step", "detect_s", "recover_s", "steps_redone")
        return json.dumps({
            "phase": view.phase.value,
            "steps": status.progress.step,
            "loss_first": status.progress.loss_first,
            "loss_last": status.progress.loss,
            "incidents": [{name: getattr(incident, name) for name in fields} for incident in status.incidents],
            "goodput": view.goodput,
            "layout": status.layout.model_dump() if status.layout else None,
            "losses": self.losses,
            "seconds": self.seconds,
            "storage": view.storage,
        })  # fmt: skip

    def show(self, out: Console) -> None:
        status, facts = self.job.status, Table.grid(padding=(0, 2, 0, 0))
        facts.add_column(style="bold", no_wrap=True)
        facts.add_column(overflow="fold")
        first, last = (tables.number(value, ".4f") for value in (status.progress.loss_first, status.progress.loss))
        facts.add_row("result", f"{self.job.phase} after {status.progress.step} steps, {self.seconds:.0f} s")
        facts.add_row("layout", str(status.layout))
        facts.add_row("loss", f"{first} at first, {last} at last")
        for incident in status.incidents:
            facts.add_row(f"incident {incident.number}", (
                f"{incident.message} ({incident.cause or incident.kind}); known after {incident.detect_s:.2f} s, "
                f"next new step after {tables.number(incident.recover_s, '.1f')} s, "
                f"{incident.steps_redone} steps redone"
            ))  # fmt: skip
        facts.add_row("goodput", f"{self.job.goodput:.1%}")
        facts.add_row("logs", f"{self.job.storage}/logs")
        facts.add_row("checkpoints", f"{self.job.storage}/checkpoints, newest {status.checkpoint}")
        out.print()
        out.print(facts)


def fresh_home(base: Path) -> Path:
    """A folder of its own for each run, so that nothing of another run or of `phalanx up` is touched."""
    home = base / "demo" / time.strftime("%Y%m%d-%H%M%S")
    home.mkdir(parents=True, exist_ok=True)
    return home


def run(home: Path, steps: int, kill: bool, out: Console) -> Summary:
    """Raises ClusterError when the fleet doesn't come up. Whatever happens, no process is left."""
    with out.status("starting a Ray head, four nodes in two racks, the controller and the API") as status:
        fleet = _start(home)
        try:
            client = Client.find(home)
            status.stop()
            return _train(client, steps, kill, out)
        finally:
            status.update("shutting down")
            status.start()
            _end(fleet, home)


def _train(client: Client, steps: int, kill: bool, out: Console) -> Summary:
    began = time.monotonic()
    uid = client.submit(job(steps)).uid
    out.print(f"submitted {uid} to {client.url}")
    if kill:
        arguments = (client.url, client.token, uid, steps // 2, out)
        threading.Thread(target=_kill_half_way, args=arguments, daemon=True).start()
    view = show.watch(client, uid, out)
    summary = Summary(view, tuple(_loss(step) for step in client.metrics(uid)), time.monotonic() - began)
    summary.show(out)
    return summary


def _loss(step: StepView) -> float:
    return float(step.model_dump()["loss"])


def _kill_half_way(url: str, token: str, uid: str, half: int, out: Console) -> None:
    with Client(url, token) as client:
        while (view := client.get(uid)).status.progress.step < half:
            if view.phase.terminal:
                return
            time.sleep(POLL_S)
        line = next(line.text for line in client.logs(uid, rank=VICTIM) if "pid" in line.text)
        pid = int(re.search(r"pid (\d+)", line)[1])  # type: ignore[index]
        out.print(f"SIGKILL to rank {VICTIM}, pid {pid}, at step {view.status.progress.step}", style="bold red")
        os.kill(pid, signal.SIGKILL)


def _start(home: Path) -> subprocess.Popen[str]:
    with (home / "fleet.log").open("w") as log:
        command = [sys.executable, "-m", "service.local", "--home", str(home), "--api-port", "0"]
        fleet = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    deadline = threading.Timer(READY_S, fleet.terminate)
    deadline.start()
    try:
        assert fleet.stdout is not None
        if "ready" not in fleet.stdout.readline():
            fleet.wait()
            raise errors.ClusterError("the local fleet did not come up", hint=f"see {home}/*.log")
    except BaseException:
        _end(fleet, home)
        raise
    finally:
        deadline.cancel()
    return fleet


def _end(fleet: subprocess.Popen[str], home: Path) -> None:
    fleet.terminate()
    try:
        fleet.wait(30)
    except subprocess.TimeoutExpired:
        fleet.kill()
        fleet.wait()
    if fleet.stdout is not None:
        fleet.stdout.close()
    roster.down(home)
