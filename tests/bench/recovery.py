"""A killed rank and a lost node of the same training of eight ranks: here, under Ray Train v2, and under torchrun.

`python tests/bench/recovery.py --json [--runs 5] [--only ours|ray|torchrun]`. All three run `workers.trainer`, with a
checkpoint every ten steps. They take turns, each with the machine to itself: a turn starts the training anew, kills a
rank in the middle of a step halfway between two checkpoints, then all processes of a node, and both once more. Seconds
are from the SIGKILL to the end of the first step that had not been completed before, by the trainer's own stamps. Ours
has standbys, a spare node and a snapshot every step, Ray Train has a node to spare; torchrun's agent is started again
at once.

A ratio is ours over theirs, of medians: below 1, ours is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from service import roster
from tests.bench.recovery_fault import JOB, Fault, suffer

SIDES = {"ours": "", "ray": "ray_train_", "torchrun": "torchrun_"}
"""Sides, and what their figures' names begin with."""
FAULTS: tuple[Fault, ...] = ("rank", "node")
RUNS = 2  # of each fault in a turn, at most
TURN_S = 900.0
RAY_TRAIN = ("pandas", "pyarrow", "tensorboardX")
ROOT = Path(__file__).parents[2]
Costs = dict[str, dict[str, list[dict[str, Any]]]]  # side -> fault -> of each run


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.turn:
        take(options.turn, options.folder, options.runs)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    keep_orphans()
    sides = [options.only] if options.only else list(SIDES)
    if "ray" in sides and (absent := [name for name in RAY_TRAIN if importlib.util.find_spec(name) is None]):
        parser().error(f"{' and '.join(absent)}, which Ray Train needs, are not installed: pip install -e '.[bench]'")
    costs: Costs = {side: {fault: [] for fault in FAULTS} for side in sides}
    folder = Path(tempfile.mkdtemp(prefix="phx-"))  # short: Ray's sockets lie below it
    try:
        for first in range(0, options.runs, RUNS):
            for side in sides if first // RUNS % 2 == 0 else reversed(sides):
                runs = min(RUNS, options.runs - first)
                for fault, cost in turn(side, folder / f"{first}{side[0]}", runs):
                    costs[side][fault].append(cost)
                    print(f"{side:8} {fault}  {told(cost)}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = figures(costs)
    for side in sides:
        for fault in FAULTS:
            print(f"{side:8} {fault}  {spread(costs[side][fault])}")
    if options.json:
        print(json.dumps(found))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="end with one line of JSON")
    made.add_argument("--runs", type=int, default=5, help="of each fault on each side")
    made.add_argument("--only", choices=SIDES, help="this side alone")
    made.add_argument("--turn", choices=SIDES, help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return made


def turn(side: str, folder: Path, runs: int) -> list[tuple[Fault, dict[str, Any]]]:
    """One turn of a side, in a process of its own, since Ray reads its environment when it is imported. Each fault and
    what it cost; nothing of the turn is left, neither processes nor files.
    """
    folder.mkdir()
    command = [sys.executable, __file__, "--turn", side, "--folder", str(folder), "--runs", str(runs)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TURN_S)
    finally:
        end_all()
        roster.down(folder / "home")  # ours may not have come to forgetting its temporary folders
    if not (folder / "found").exists():  # how it ended after that says nothing: it is a driver whose cluster goes
        lines = (folder / "log").read_text(errors="replace").splitlines()[-30:]
        raise RuntimeError("\n".join([f"the turn of {side} ended with {process.returncode}; its last lines:", *lines]))
    found: list[tuple[Fault, dict[str, Any]]] = json.loads((folder / "found").read_text())
    shutil.rmtree(folder, ignore_errors=True)
    return found


def take(side: str, folder: Path, runs: int) -> None:
    (folder / "job.json").write_text(json.dumps(JOB))
    with importlib.import_module(f"tests.bench.recovery_{side}").started(folder) as training:
        found = [(fault, dataclasses.asdict(suffer(training, fault))) for fault in FAULTS * runs]
        (folder / "found").write_text(json.dumps(found))


def keep_orphans() -> None:
    """Processes whose parents die become children of this one, so that it finds them."""
    if sys.platform == "linux":
        set_child_subreaper = 36
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def end_all() -> None:
    while family := roster.family(os.getpid())[1:]:  # some may have been starting others
        roster.end(family)
        reap()
        time.sleep(0.05)


def reap() -> None:
    """Take note of the ends of adopted processes, which otherwise stay as zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def figures(costs: Costs) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for side, faults in costs.items():
        for fault, runs in faults.items():
            prefix = SIDES[side] + fault
            found[f"{prefix}_recover_s"] = round(median(runs, "recover_s"), 3)
            found[f"{prefix}_steps_redone"] = median(runs, "steps_redone")
    for theirs in set(costs) & {"ray", "torchrun"} if "ours" in costs else ():
        for fault in FAULTS:
            ratio = median(costs["ours"][fault], "recover_s") / median(costs[theirs][fault], "recover_s")
            found[f"vs_{SIDES[theirs]}{fault}"] = round(ratio, 4)
    return found | {"costs": costs}


def median(runs: list[dict[str, Any]], name: str) -> float:
    return float(statistics.median(run[name] for run in runs))


def told(cost: dict[str, Any]) -> str:
    parts = "".join(f"  {name.removesuffix('_s')} {seconds:.2f}" for name, seconds in cost["parts"].items())
    return (
        f"{cost['recover_s']:6.2f} s  {cost['steps_redone']} steps redone  "
        f"a step {cost['step_s']:.2f} s  load {cost['load']:.1f}{parts}"
    )


def spread(runs: list[dict[str, Any]]) -> str:
    seconds = sorted(run["recover_s"] for run in runs)
    redone, load = median(runs, "steps_redone"), median(runs, "load")
    return (
        f"median {statistics.median(seconds):.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f}), {redone:g} steps redone  "
        f"load {load:.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
