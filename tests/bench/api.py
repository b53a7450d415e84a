"""The API on a store of many jobs: lists, one job, filtered lists, submissions, and watchers of events.

`python tests/bench/api.py --json`, on SQLite and, where one is installed, on a real PostgreSQL. One API process; who
asks runs on the same machine. Milliseconds are of whole requests over one kept connection; `event_lag_s` is from the
commit of an event to its arrival at a watcher.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

import httpx
import psutil
import sqlalchemy as sa

from service.contracts.job import Phase, parse_job
from service.contracts.status import JobStatus, Progress
from service.store import database, models
from service.store.jobs import Store
from service.store.records import Changes
from tests import postgres
from tests.api.world import job

TEAMS, NAMES = 50, 200
PHASES = [
    *[Phase.SUCCEEDED.value] * 6,
    Phase.FAILED.value,
    Phase.CANCELLED.value,
    Phase.QUEUED.value,
    Phase.RUNNING.value,
]
BATCH = 5000
SUBMITTERS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    jobs: int = 50_000
    metrics: int = 5_000_000
    requests: int = 300
    submit_s: float = 10.0
    watchers: int = 500
    told: int = 50


def fill(url: str, sizes: Sizes) -> None:
    """The jobs of months, their labels and their metrics, in as few transactions as can be."""
    store = Store.open(url)
    spec = parse_job(job()).model_dump(mode="json")
    status = JobStatus(progress=Progress(steps=20)).model_dump(mode="json")
    opened, chance = database.Database(url), random.Random(7)
    for first in range(0, sizes.jobs, BATCH):
        rows, labels = [], []
        for number in range(first, min(first + BATCH, sizes.jobs)):
            phase, at = PHASES[number % len(PHASES)], 1e9 + number
            name = f"run-{number % NAMES}"
            rows.append({
                "uid": uid_of(number), "seq": number + 1, "name": name, "phase": phase, "reason": "as it is",
                "spec": {**spec, "name": name}, "status": status, "core": None, "created_at": at, "updated_at": at,
                "ended_at": at if Phase(phase).terminal else None, "cancel_requested": False, "project": "default",
            })  # fmt: skip
            labels.append({"key": "team", "value": f"t{chance.randrange(TEAMS)}", "seq": number + 1})
        with opened.write() as connection:
            connection.execute(sa.insert(models.jobs), rows)
            connection.execute(sa.insert(models.job_labels), labels)
    with opened.write() as connection:
        connection.execute(sa.update(models.counters).where(models.counters.c.name == "jobs").values(value=sizes.jobs))
    _fill_metrics(opened, sizes)
    with opened.write() as connection:
        if opened.kind == "postgresql":
            connection.execute(sa.text("ANALYZE"))
    opened.close()
    store.close()


def _fill_metrics(opened: database.Database, sizes: Sizes) -> None:
    """As many steps of each of a hundred jobs."""
    data = {"loss": 2.5, "grad_norm": 0.7, "tokens": 65536, "step_s": 1.5, "tokens_per_s": 43690.0}
    steps = sizes.metrics // 100
    for number in range(100):
        rows = [
            {"job": uid_of(number), "step": step, "attempt": 1, "at": 1e9 + step, "data": data}
            for step in range(1, steps + 1)
        ]
        for first in range(0, len(rows), 10 * BATCH):
            with opened.write() as connection:
                connection.execute(sa.insert(models.metrics), rows[first : first + 10 * BATCH])


def uid_of(number: int) -> str:
    return f"run-{number % NAMES}-{number:08x}"


@contextlib.contextmanager
def serving(url: str, home: Path) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    environ = {**os.environ, "PHALANX_HOME": str(home), "PHALANX_STORE": url}
    with (home / "api.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "api", "--port", "0"], env=environ, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not (home / "api.json").exists():
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError((home / "api.log").read_text()[-2000:])
            time.sleep(0.05)
        base = json.loads((home / "api.json").read_text())["url"]
        headers = {"Authorization": f"Bearer {(home / 'token').read_text().strip()}"}
        with httpx.Client(base_url=base, headers=headers, timeout=60) as client:
            yield client, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


def p95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


def timed(count: int, ask: Callable[[], httpx.Response]) -> float:
    """Milliseconds at p95."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        answer = ask()
        found.append(1000 * (time.perf_counter() - began))
        answer.raise_for_status()
    return round(p95(found), 2)


def reads(client: httpx.Client, sizes: Sizes) -> dict[str, float]:
    chance = random.Random(3)
    pages: list[str | None] = [None]
    for _ in range(40):
        page = client.get("/v1/jobs", params={"limit": 200, **({"page": pages[-1]} if pages[-1] else {})}).json()
        pages.append(page["next_page"])
        if page["next_page"] is None:
            break
    known = [page for page in pages if page] or [""]

    def listed() -> httpx.Response:
        return client.get("/v1/jobs", params={"limit": 50, "page": chance.choice(known)} if known[0] else {})

    def one() -> httpx.Response:
        return client.get(f"/v1/jobs/{uid_of(chance.randrange(sizes.jobs))}")

    def filtered() -> httpx.Response:
        wanted: list[dict[str, Any]] = [
            {"label": f"team=t{chance.randrange(TEAMS)}"},
            {"phase": ["running", "queued"]},
            {"phase": "failed", "label": f"team=t{chance.randrange(TEAMS)}"},
            {"name": f"run-{chance.randrange(NAMES)}", "order": "created"},
            {"name": "run-1*", "phase": "succeeded"},
            {"label": "nobody"},
        ]
        return client.get("/v1/jobs", params={"limit": 50, **chance.choice(wanted)})

    def sampled() -> httpx.Response:
        return client.get(f"/v1/jobs/{uid_of(chance.randrange(100))}/metrics", params={"max_points": 500})

    return {
        "list_p95_ms": timed(sizes.requests, listed),
        "get_p95_ms": timed(sizes.requests, one),
        "filter_p95_ms": timed(sizes.requests, filtered),
        "sampled_p95_ms": timed(max(3, sizes.requests // 20), sampled),
    }


def submits(client: httpx.Client, sizes: Sizes) -> float:
    """Accepted a second, by clients that each wait for their answer."""
    counts, over = [0] * SUBMITTERS, time.monotonic() + sizes.submit_s
    body = json.dumps(job()).encode()

    def work(number: int) -> None:
        headers = {"Authorization": client.headers["Authorization"], "Content-Type": "application/json"}
        own = http.client.HTTPConnection(client.base_url.host, client.base_url.port or 80, timeout=60)
        with contextlib.closing(own):
            while time.monotonic() < over:
                own.request("POST", "/v1/jobs", body, {**headers, "Idempotency-Key": f"{number}-{counts[number]}"})
                answer = own.getresponse()
                if answer.status != 201:
                    raise RuntimeError(f"{answer.status}: {answer.read()[:500]!r}")
                answer.read()
                counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(SUBMITTERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return round(sum(counts) / sizes.submit_s, 1)


async def watched(client: httpx.Client, url: str, sizes: Sizes) -> float:
    """Seconds at p95 until a watcher has an event; each of a job of its own or of one that others watch too."""
    uids = [client.post("/v1/jobs", json=job()).json()["uid"] for _ in range(10)]
    lags: list[float] = []
    ready, token = asyncio.Semaphore(0), client.headers["Authorization"]

    async def watch(uid: str) -> None:
        host, port = client.base_url.host, client.base_url.port
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(
            f"GET /v1/jobs/{uid}/events?follow=true HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\n\r\n".encode()
        )
        heard = 0
        try:
            while heard < sizes.told:
                line = await reader.readline()
                if b'"JobSubmitted"' in line:
                    ready.release()
                elif line.startswith(b"data:") and b'"Said"' in line:
                    lags.append(time.time() - json.loads(line[5:])["at"])
                    heard += 1
        finally:
            writer.close()

    watchers = [asyncio.create_task(watch(uids[number % len(uids)])) for number in range(sizes.watchers)]
    for _ in watchers:
        await ready.acquire()
    store = Store.open(url)
    epoch = store.acquire("bench", 600) or 0
    for number in range(sizes.told):
        events = [(uid, time.time(), "Said", f"news {number}", {}) for uid in uids]
        await asyncio.to_thread(store.commit, epoch, Changes(events=events))
        await asyncio.sleep(0.2)
    await asyncio.gather(*watchers)
    store.close()
    return round(p95(lags), 3)


def bench(url: str, sizes: Sizes, home: Path) -> dict[str, float]:
    began = time.monotonic()
    fill(url, sizes)
    sys.stderr.write(f"filled in {time.monotonic() - began:.0f} s\n")
    with serving(url, home) as (client, process):
        found = reads(client, sizes)
        found["submits_per_s"] = submits(client, sizes)
        found["watchers"] = sizes.watchers
        found["event_lag_p95_s"] = asyncio.run(watched(client, url, sizes))
        found["rss_mb"] = round(process.memory_info().rss / 2**20, 1)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    parser.add_argument("--only", choices=["sqlite", "postgresql"])
    for field in dataclasses.fields(Sizes):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default)
    given = parser.parse_args(arguments)
    sizes = Sizes(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Sizes)})
    found: dict[str, dict[str, float]] = {}
    if given.only != "postgresql":
        with tempfile.TemporaryDirectory() as folder:
            found["sqlite"] = bench(f"sqlite:///{folder}/store.sqlite3", sizes, Path(folder))
    if given.only != "sqlite" and postgres.found():
        with tempfile.TemporaryDirectory() as folder, postgres.server() as server:
            found["postgresql"] = bench(server.url.render_as_string(hide_password=False), sizes, Path(folder))
    by_key: dict[str, Any] = {}
    for kind, figures in found.items():
        for name, value in figures.items():
            by_key.setdefault(name, {})[kind] = value
            print(f"{kind:12} {name:16} {value}")
    if given.json:
        print(
            json.dumps({**by_key, "load": os.getloadavg()[:2], **dataclasses.asdict(sizes), "watchers": sizes.watchers})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
