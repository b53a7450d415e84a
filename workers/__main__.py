"""`torchrun --nproc-per-node 8 -m workers job.yaml --root runs`: the same training without Ray or service.

Rank 0 publishes checkpoints once every rank has reported its shard, and prints one JSON line a step. Started again with
the same `--root` and `--job` it continues at the newest good checkpoint, in any layout; under another `--job` it starts
anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from pydantic import ValidationError

from workers import trainer
from workers.checkpoint import manifest
from workers.checkpoint.publisher import Publisher, newest_attempt
from workers.checkpoint.shards import Corrupt
from workers.checkpoint.storage import Storage
from workers.parallel import compiled
from workers.reports import CheckpointRefused, Moved, Report, SaveFailed, ShardSaved
from workers.spec import Assignment, ParallelLayout, RunSpec, layouts

SLOWEST_SAVE = datetime.timedelta(hours=1)  # that ranks wait for each other


def main(arguments: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    options = _options(arguments)
    rank, world = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    try:
        run = _run(options.job_file, world)
        storage = Storage.open(options.root).child(options.job)
    except (ValueError, OSError, yaml.YAMLError) as error:
        sys.stderr.write(f"{options.job_file}: {_sentence(error)}\n" if rank == 0 else "")
        return 2
    trainer.quieten(options.device)
    store = _store(environment, world)
    found = {"attempt": newest_attempt(storage) + 1, "resume": manifest.published(storage)} if rank == 0 else None
    start = _shared(store, found)
    assignment = Assignment(
        job=options.job,
        attempt=start["attempt"],
        token="torchrun",
        rank=rank,
        run=run,
        root=options.root,
        store_host="",
        store_port=0,
        local_index=int(environment.get("LOCAL_RANK", "0")),
        device=options.device,
        resume=tuple(start["resume"]),
    )
    kept = Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}" / "kept"
    for name, value in compiled.environment(kept, assignment.timeout_s).items():
        os.environ.setdefault(name, value)
    voice = Voice(assignment, storage, dist.PrefixStore("shards", store.clone()))  # it speaks in two threads
    trainer.train(assignment, dist.PrefixStore("ranks", store), voice)
    voice.close()
    return 0


class Voice:
    """Prints rank 0's reports as JSON lines, and carries the end of every rank's save to rank 0, which publishes."""

    def __init__(self, assignment: Assignment, storage: Storage, store: dist.Store) -> None:
        self.assignment, self.store = assignment, store
        self.publisher = Publisher(storage, assignment.job, assignment.attempt, assignment.token, assignment.run)
        self.refused: set[str] = set()

    def __call__(self, report: Report) -> None:
        speaks = self.assignment.rank == 0
        match report:
            case ShardSaved() | SaveFailed():
                self._tell_rank_0(report)
                if speaks:
                    self._conclude(report.step)
            case Moved():
                pass
            case _ if speaks:
                if isinstance(report, CheckpointRefused):
                    self.refused.add(report.manifest)
                _print(type(report).__name__, dataclasses.asdict(report))

    def _tell_rank_0(self, report: ShardSaved | SaveFailed) -> None:
        saved = isinstance(report, ShardSaved)
        self.store.set(f"{report.step}/{report.rank}", json.dumps([saved, dataclasses.asdict(report)]))

    def _conclude(self, step: int) -> None:
        """Publish the checkpoint if every rank saved its part; otherwise say why not. Training goes on."""
        keys = [f"{step}/{rank}" for rank in range(self.assignment.world)]
        self.store.wait(keys, SLOWEST_SAVE)
        said = [json.loads(self.store.get(key)) for key in keys]
        failures = [values for saved, values in said if not saved]
        if failures:
            _print("SaveFailed", failures[0])
            return
        try:
            path = self.publisher.publish(step, [ShardSaved(**values) for _, values in said])
        except (OSError, manifest.Incomplete, Corrupt) as error:
            _print("SaveFailed", dataclasses.asdict(SaveFailed(step, 0, f"not published: {error}")))
            return
        _print("CheckpointPublished", {"step": step, "manifest": path})
        try:
            self.publisher.retain(self.refused)
        except OSError as error:
            sys.stderr.write(f"old checkpoints could not be removed: {error}\n")

    def close(self) -> None:
        """Rank 0 may host the store: it leaves last."""
        self.store.set(f"closed/{self.assignment.rank}", "")
        if self.assignment.rank == 0:
            self.store.wait([f"closed/{rank}" for rank in range(self.assignment.world)], SLOWEST_SAVE)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    parser.add_argument("job_file", type=Path, help="a job as YAML or JSON; fields of the service are passed over")
    parser.add_argument("--root", required=True, help="storage root: a path or fsspec URI")
    parser.add_argument("--job", default="run", help="name of the run under the root")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    return parser.parse_args(arguments)


def _run(path: Path, world: int) -> RunSpec:
    job = yaml.safe_load(path.read_text())
    if not isinstance(job, dict):
        raise ValueError(f"a job is a mapping of fields, as `train: {{steps: 100}}`, not {type(job).__name__}")
    automatic = job.get("parallel") in (None, "auto")
    run = RunSpec.from_job({**job, "parallel": {}} if automatic else job)
    if automatic:
        layout = next(layouts(world, run.model, run.train), ParallelLayout())
        run = run.model_copy(update={"parallel": layout})
    needed = run.parallel.world
    if needed != world:
        raise ValueError(
            f"{run.parallel} needs {needed} ranks, and {world} were started: "
            f"use torchrun --nproc-per-node {needed}, or change parallel"
        )
    return run


def _sentence(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    problems = [(".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")) for item in error.errors()]
    return "; ".join(f"{field}: {message}" if field else message for field, message in problems)


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
