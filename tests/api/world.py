"""A store, its API on a real port, and a hand that writes what a controller would."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from api import serve
from api.app import create_app
from api.client import Client
from api.rules import Rules
from service.contracts.job import Phase, parse_job
from service.contracts.status import JobStatus, JobView, Progress
from service.store.jobs import Store
from service.store.records import Changes, CheckpointRow, JobUpdate, LogChunk, NodeRow
from workers.checkpoint import manifest, shards
from workers.checkpoint.shards import Piece, Region
from workers.checkpoint.storage import Storage
from workers.cursor import Cursor
from workers.spec import ParallelLayout

TOKEN = "s3cret-token"

JOB: dict[str, Any] = {
    "name": "topics",
    "model": {"layers": 4, "hidden": 64, "heads": 4, "seq_len": 64},
    "data": {"source": "builtin:topics"},
    "train": {"steps": 20, "global_batch": 8},
    "resources": {"device": "cpu", "slots": 4},
}

GONE = object()


def job(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A job that is fine but for `changes`: dotted field -> value, GONE removes it."""
    made = copy.deepcopy(JOB)
    for path, value in (changes or {}).items():
        *parents, name = path.split(".")
        inner = made
        for parent in parents:
            inner = inner.setdefault(parent, {})
        if value is GONE:
            del inner[name]
        else:
            inner[name] = value
    return made


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """What `condition` gives once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
    return value


class World:
    def __init__(self, home: Path, url: str = "") -> None:
        """`url`: of the database; default a SQLite file in `home`."""
        self.home = home
        self.root = str(home / "runs")
        self.store = Store.open(url or f"sqlite:///{home / 'store.sqlite3'}")
        self.epoch = self.store.acquire("test", 3600.0)
        self.app = create_app(self.store, TOKEN, self.root, Rules((str(home / "more"),), ("mine.models",)))
        self.port = 0
        self.start()
        (home / "token").write_text(TOKEN)
        (home / "api.json").write_text(json.dumps({"url": self.url}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._socket = serve.listen("127.0.0.1", self.port)
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(self.app, log_config=None, access_log=False, timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()
        until(lambda: self._server.started)

    def stop(self) -> None:
        """Cut every connection, in the middle of what it says."""
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()

    def close(self) -> None:
        self.stop()
        self.store.close()

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        with Client(self.url, TOKEN) as made:
            yield made

    def submit(self, changes: dict[str, Any] | None = None) -> JobView:
        with self.client() as client:
            return client.submit(job(changes))

    def commit(self, **changes: Any) -> None:
        assert self.epoch is not None
        self.store.commit(self.epoch, Changes(**changes))

    def move(self, uid: str, phase: Phase, reason: str = "", **progress: Any) -> None:
        """The job enters `phase`, and an event says so."""
        now = time.time()
        status = JobStatus(attempt=1, progress=Progress(steps=20, **progress), productive_s=0.5)
        update = JobUpdate(
            uid, phase.value, reason, status.model_dump(mode="json"), {}, now if phase.terminal else None
        )
        self.commit(jobs=[update], events=[(uid, now, "PhaseChanged", f"now {phase}", {"phase": phase.value})])

    def say(self, uid: str, *reasons: str) -> None:
        self.commit(events=[(uid, time.time(), "Said", reason, {}) for reason in reasons])

    def log(self, uid: str, path: str, lines: list[tuple[int, str]], attempt: int = 1, node: str = "n1") -> None:
        """Ship one chunk of (rank, text)."""
        file = Path(self.root, uid, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = (
            {"at": 1.0, "attempt": attempt, "rank": rank, "node": node, "stream": "out", "text": text}
            for rank, text in lines
        )
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        self.commit(log_chunks=[LogChunk(uid, attempt, node, path, len(lines), 1.0)])

    def checkpoint(self, uid: str, step: int, attempt: int = 1, rejected: str | None = None, told: bool = True) -> str:
        """Publish a real one of a few bytes, for the job's own model and data; its manifest's path."""
        spec = parse_job(self.store.job(uid).spec)
        run, storage = spec.run(ParallelLayout()), Storage.open(f"{self.root}/{uid}")
        ledger = [{"attempt": attempt, "start": 0, "end": 8 * step}]
        header = Cursor(attempt, step, 8 * step, ledger).header(run, {"optimizer": {"name": "adamw", "steps": step}})
        pieces = [
            Piece(Region(name, (16,), "uint8", (0,), (0,), (16,)), lambda: bytes(16))
            for name in ("model.norm.weight", "optimizer.exp_avg.norm.weight")
        ]
        record = shards.write(storage, manifest.folder(step, attempt, "t"), 0, pieces)
        document = manifest.assemble(
            storage, job=uid, step=step, attempt=attempt, token="t", layout=run.parallel.model_dump(),
            model=run.model.model_dump(), header=header, records=[record], created_at=time.time(),
        )  # fmt: skip
        manifest.publish(storage, document)
        if told:
            row = CheckpointRow(uid, step, attempt, document.path, time.time(), rejected, document.nbytes)
            self.commit(checkpoints=[row])
        return document.path

    def intents(self, uid: str) -> list[tuple[str, dict[str, Any]]]:
        """(kind, data) of what the job's user wants, and no controller has done."""
        return [(intent.kind, dict(intent.data)) for intent in self.store.intents(10_000) if intent.job == uid]

    @contextlib.contextmanager
    def fleet(self, *slots: int) -> Iterator[None]:
        """Nodes n1, n2, ... with so many CPU slots each, for a while."""
        rows = [
            NodeRow(f"id{number}", f"n{number}", count, "", "", "cpu", "127.0.0.1", time.time())
            for number, count in enumerate(slots, 1)
        ]
        self.commit(nodes=rows)
        try:
            yield
        finally:
            self.commit(nodes=[])


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """One server-sent message as it came."""

    id: str | None
    event: str | None
    data: Any


def read_stream(text: str) -> list[Said]:
    """Messages of a whole stream, read without the client's own parser."""
    found = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if fields:
            found.append(Said(fields.get("id"), fields.get("event"), json.loads(fields["data"])))
    return found
