"""`torchrun --nproc-per-node 8 -m workers job.yaml --root runs`: the same training without Ray or service.

Rank 0 publishes checkpoints once every rank has reported its shard, and prints one JSON line a step. Started again with
the same `--root` and `--job` it continues at the newest good checkpoint, in any layout.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from pydantic import ValidationError

from workers import trainer
from workers.checkpoint import manifest
from workers.checkpoint.publisher import Publisher, newest_attempt
from workers.checkpoint.storage import Storage
from workers.reports import Report, ShardSaved
from workers.spec import Assignment, RunSpec


def main(arguments: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    options = _options(arguments)
    rank, world = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    try:
        run = _run(options.job_file, world)
    except (ValidationError, ValueError, OSError) as error:
        sys.stderr.write(f"{options.job_file}: {error}\n" if rank == 0 else "")
        return 2
    trainer.quieten(options.device)
    store = _store(environment, world)
    storage = Storage.open(options.root).child(options.job)
    resume = tuple(manifest.published(storage)) if options.resume and rank == 0 else ()
    start = _shared(store, {"attempt": newest_attempt(storage) + 1, "resume": resume} if rank == 0 else None)
    assignment = Assignment(
        job=options.job, attempt=start["attempt"], token="torchrun", rank=rank, run=run, root=options.root, store_host="", store_port=0,
        local_index=int(environment.get("LOCAL_RANK", "0")), device=options.device,
        resume=tuple(start["resume"]),
    )  # fmt: skip
    voice = Voice(assignment, storage, dist.PrefixStore("shards", store))
    trainer.train(assignment, dist.PrefixStore("ranks", store), voice)
    voice.close()
    return 0


class Voice:
    """Prints rank 0's reports as JSON lines, and carries every rank's shard records to rank 0, which publishes."""

    def __init__(self, assignment: Assignment, storage: Storage, store: dist.Store) -> None:
        self.assignment, self.store = assignment, store
        self.publisher = Publisher(storage, assignment.job, assignment.attempt, assignment.token, assignment.run)

    def __call__(self, report: Report) -> None:
        if isinstance(report, ShardSaved):
            self.store.set(f"{report.step}/{report.rank}", json.dumps(dataclasses.asdict(report)))
            if self.assignment.rank == 0:
                self._publish(report.step)
        elif self.assignment.rank == 0:
            _print(type(report).__name__, dataclasses.asdict(report))

    def _publish(self, step: int) -> None:
        records = [ShardSaved(**json.loads(self.store.get(f"{step}/{rank}"))) for rank in range(self.assignment.world)]
        path = self.publisher.publish(step, records)
        self.publisher.retain()
        _print("CheckpointPublished", {"step": step, "manifest": path})

    def close(self) -> None:
        """Rank 0 may host the store: it leaves last."""
        self.store.set(f"closed/{self.assignment.rank}", "")
        if self.assignment.rank == 0:
            self.store.wait([f"closed/{rank}" for rank in range(self.assignment.world)])


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    parser.add_argument("job_file", type=Path, help="a job as YAML or JSON; fields of the service are passed over")
    parser.add_argument("--root", required=True, help="storage root: a path or fsspec URI")
    parser.add_argument("--job", default="run", help="name of the run under the root")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--no-resume", dest="resume", action="store_false", help="start from the seed")
    return parser.parse_args(arguments)


def _run(path: Path, world: int) -> RunSpec:
    job: dict[str, Any] = yaml.safe_load(path.read_text())
    if job.get("parallel") in (None, "auto"):
        job["parallel"] = {"dp": world}
    run = RunSpec.from_job(job)
    if run.parallel.world != world:
        raise ValueError(f"{run.parallel} needs {run.parallel.world} ranks; torchrun started {world}")
    return run


def _store(environment: Mapping[str, str], world: int) -> dist.Store:
    if world == 1 and "MASTER_PORT" not in environment:
        return dist.HashStore()
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master = not hosted and environment.get("RANK") == "0"
    restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"phalanx/{restart}", dist.TCPStore(host, port, world, master, wait_for_workers=False))


def _shared(store: dist.Store, value: dict[str, Any] | None) -> dict[str, Any]:
    """Rank 0's value, on every rank: what was in storage when it looked."""
    if value is not None:
        store.set("start", json.dumps(value))
    return json.loads(store.get("start"))


def _print(kind: str, values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"report": kind, **values}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
