"""S5: the API is killed again and again under load. What it accepted is there, once; what is followed has no gap."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.client import Client
from service.contracts import errors
from service.contracts.job import Phase
from service.store.jobs import Store
from service.store.records import Changes, JobUpdate, LogChunk
from tests.api.world import job, until

pytestmark = pytest.mark.server

KILLS = 20
SUBMITTERS, READERS = 3, 4
UP_S = 0.4  # that each process is left to serve


class Api:
    """A process on one port, started again after each death."""

    def __init__(self, home: Path) -> None:
        self.home = home
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        (self.home / "api.json").unlink(missing_ok=True)
        environ = {**os.environ, "PHALANX_HOME": str(self.home)}
        command = [sys.executable, "-m", "api", "--port", str(self.port)]
        with (self.home / "api.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environ, stderr=log)
        until((self.home / "api.json").exists, 30)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", (self.home / "token").read_text().strip())


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    made = Api(tmp_path)
    made.start()
    yield made
    made.kill()


class Load:
    """Jobs that are submitted until each is accepted, and readers of one job's events and log."""

    def __init__(self, api: Api, uid: str) -> None:
        self.api, self.uid, self.over = api, uid, threading.Event()
        self.accepted: dict[str, list[str]] = {}  # key -> uids that were answered
        self.events: list[list[str]] = []
        self.lines: list[list[str]] = []
        self.threads = [threading.Thread(target=self.submit, args=(number,)) for number in range(SUBMITTERS)]
        self.threads += [threading.Thread(target=self.follow) for _ in range(READERS)]
        self.threads += [threading.Thread(target=self.read) for _ in range(READERS)]
        for thread in self.threads:
            thread.start()

    def submit(self, number: int) -> None:
        with self.api.client() as client:
            turn = 0
            while not self.over.is_set():
                turn += 1
                key = f"{number}-{turn}"
                answers = self.accepted.setdefault(key, [])
                while not answers or (turn % 5 == 0 and len(answers) < 2):  # some are sent again though they arrived
                    try:
                        answers.append(client.submit(job(), key).uid)
                    except errors.ClusterError:
                        time.sleep(0.02)

    def follow(self) -> None:
        with self.api.client() as client:
            self.events.append([event.reason for event in client.events(self.uid, follow=True)])

    def read(self) -> None:
        with self.api.client() as client:
            self.lines.append([line.text for line in client.logs(self.uid, follow=True)])

    def end(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


class Controller:
    """Tells of one job all the while."""

    def __init__(self, home: Path, uid: str) -> None:
        self.store, self.home, self.uid, self.over = Store.open(f"sqlite:///{home}/store.sqlite3"), home, uid, False
        self.epoch = self.store.acquire("test", 600) or 0
        self.told: list[str] = []
        self.lines: list[str] = []
        self.thread = threading.Thread(target=self.tell)
        self.thread.start()

    def tell(self) -> None:
        while not self.over:
            self.say(Phase.RUNNING)
            time.sleep(0.02)
        self.say(Phase.SUCCEEDED)

    def say(self, phase: Phase) -> None:
        number, now = len(self.told), time.time()
        self.told.append(f"news {number}")
        self.lines.append(f"line {number}")
        path = f"logs/{number}.jsonl"
        file = self.home / "runs" / self.uid / path
        file.parent.mkdir(parents=True, exist_ok=True)
        line = {"at": now, "attempt": 1, "rank": 0, "node": "n0", "stream": "out", "text": self.lines[-1]}
        file.write_text(json.dumps(line) + "\n")
        status = self.store.job(self.uid).status
        update = JobUpdate(self.uid, phase.value, "", status, {}, now if phase.terminal else None)
        event = (self.uid, now, "Said", self.told[-1], {"phase": phase.value})
        chunk = LogChunk(self.uid, 1, "n0", path, 1, now)
        self.store.commit(self.epoch, Changes(jobs=[update], events=[event], log_chunks=[chunk]))

    def end(self) -> None:
        self.over = True
        self.thread.join()


def test_s5_an_api_that_is_killed_twenty_times_loses_and_doubles_nothing(api: Api) -> None:
    with api.client() as client:
        uid = client.submit(job()).uid
    controller = Controller(api.home, uid)
    load = Load(api, uid)
    for _ in range(KILLS):
        time.sleep(UP_S)
        api.kill()
        api.start()
    time.sleep(UP_S)
    controller.end()
    load.end()
    store = controller.store
    try:
        made = Counter(answer for answers in load.accepted.values() for answer in set(answers))
        assert all(len(set(answers)) == 1 for answers in load.accepted.values())  # a key is one job
        assert set(made.values()) == {1}  # and a job one key's
        assert len(made) > KILLS
        stored = {row.uid for row in store.jobs(limit=100_000)}
        assert stored == {uid, *made}  # none that nobody asked for
        assert len(load.events) == len(load.lines) == READERS
        for events, lines in zip(load.events, load.lines, strict=True):
            assert events == [row.reason for row in store.events(uid, 0, 100_000)]
            assert lines == controller.lines
    finally:
        store.close()
