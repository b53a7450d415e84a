"""Our checkpoints against torch.distributed.checkpoint (DCP): the same state, the same disk, four ranks on gloo.

`python tests/bench/checkpoint.py`. Saves and loads are taken in turn, so that what else runs on the machine hits both;
files are synced by both and read from memory by both. A ratio is ours over the best of DCP's writers, readers, stagers
and thread counts, in seconds, of medians: below 1, ours is faster. Of several layouts, the worst counts.

Stall: until the caller may change its state. Bytes are those that read calls returned, of index and manifest too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from tests.bench import saving
from tests.bench.saving import OURS, Sizes
from tests.pool import Pool
from tests.workers import runs
from workers.reports import Moved, ShardSaved
from workers.spec import RunSpec

SAME = (2, 2)
OTHERS = ((1, 4), (4, 1), (1, 2), (2, 1))
"""(dp, tp) that a checkpoint of dp 2 x tp 2 is loaded in."""
SIZES = {
    # state, saves of which the memory is watched and since when, model of the training, its steps
    "full": (Sizes(2, 4096), (1000, 100), (8, 256, 8, 4, 688, 256), 60),
    "tiny": (Sizes(1, 64), (20, 10), (2, 32, 4, 2, 48, 16), 20),
}
EVERY = 10  # steps between two saves of the training


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    members = Pool(4)
    try:
        with tempfile.TemporaryDirectory(prefix="phalanx-bench-", dir=options.folder) as folder:
            found = measured(members, folder, options)
    finally:
        members.end()
    if options.json:
        print(json.dumps(found))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="end with one line of JSON")
    made.add_argument("--size", choices=SIZES, default="full")
    made.add_argument("--rounds", type=int, default=7, help="saves and loads that count, of each")
    made.add_argument("--folder", help="where to save; default the system's temporary folder")
    return made


def measured(members: Pool, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    sizes, (count, since), model, steps = SIZES[options.size]
    loads_before = os.getloadavg()[0]
    saved = members.run(4, saving.saves, folder, sizes, options.rounds, timeout_s=600.0)[0]
    found: dict[str, Any] = {
        "save_ratio": ratio("save", {name: each["save_s"] for name, each in saved.items() if "async" not in name}),
        "stall_ratio": ratio("stall", {n: each["stall_s"] for n, each in saved.items() if n == OURS or "async" in n}),
    }
    loaded = {layout: in_layout(members, folder, sizes, layout, options.rounds) for layout in (SAME, *OTHERS)}
    found["load_ratio"] = loaded[SAME]["ratio"]
    found["reshard_ratio"] = max(loaded[layout]["ratio"] for layout in OTHERS)
    found["read_amplification"] = max(each["amplification"][OURS] for each in loaded.values())
    members.close()  # what they used so far is no growth
    found["stall_fraction"] = stalled(members, str(Path(folder, "training")), model, steps)
    members.close()
    grown = members.run(2, saving.growth, str(Path(folder, "small")), count, since, timeout_s=600.0)
    found["rss_growth_mb"] = round(max(grown), 2)
    print(f"growth of memory from save {since} to {count}: {max(grown):.1f} MB")
    return found | {
        "layouts": {f"dp{dp} x tp{tp}": each for (dp, tp), each in loaded.items()},
        "seconds": {name: {key: rounded(value) for key, value in each.items()} for name, each in saved.items()},
        "mib": sizes.nbytes / 2**20,
        "rounds": options.rounds,
        "load": [round(loads_before, 1), round(os.getloadavg()[0], 1)],
    }


def in_layout(members: Pool, folder: str, sizes: Sizes, layout: tuple[int, int], rounds: int) -> dict[str, Any]:
    dp, tp = layout
    ranks = members.run(dp * tp, saving.loads, folder, sizes, dp, tp, rounds, timeout_s=600.0)
    sides = list(ranks[0])
    amplification = {
        side: round(sum(rank[side]["read"] for rank in ranks) / sum(rank[side]["needed"] for rank in ranks), 4)
        for side in sides
    }
    return {
        "ratio": ratio(f"load in dp{dp} x tp{tp}", {side: ranks[0][side]["load_s"] for side in sides}),
        "amplification": amplification,
        "seconds": {side: rounded(ranks[0][side]["load_s"]) for side in sides},
    }


def stalled(members: Pool, folder: str, model: Sequence[int], steps: int) -> float:
    """Share of the time of a training on two ranks, from its first step on, that the steps' threads were blocked."""
    run = RunSpec.model_validate({
        "model": dict(zip(("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "seq_len"), model, strict=True)),
        "data": {},
        "train": {"steps": steps, "global_batch": 16, "precision": "fp32"},
        "parallel": {"dp": 2, "micro_batch": 2},
        "checkpoint": {"every_steps": EVERY},
    })  # fmt: skip
    said = members.run(2, runs.train, folder, run, 1, (), timeout_s=600.0)
    fractions = []
    for rank in said:
        times = [report.at for report in rank if isinstance(report, Moved) and report.step > 0]
        saved = [report.stall_s for report in rank if isinstance(report, ShardSaved)]
        if len(saved) != steps // EVERY:
            raise AssertionError(f"{len(saved)} saves of {steps // EVERY} succeeded")
        fractions.append(sum(saved) / (times[-1] - times[0]))
    print(f"training with a save every {EVERY} steps: blocked {max(fractions):.4%} of the time")
    return round(max(fractions), 5)


def ratio(what: str, sides: Mapping[str, Sequence[float]]) -> float:
    """Ours over the best of the others, of medians."""
    medians = {name: statistics.median(seconds) for name, seconds in sides.items()}
    best = min((name for name in sides if name != OURS), key=medians.__getitem__)
    found = medians[OURS] / medians[best]
    told = "  ".join(f"{name} {seconds:.3f}" for name, seconds in medians.items())
    print(f"{what:18} ratio {found:.3f}  best: {best}  seconds: {told}  load {os.getloadavg()[0]:.1f}", flush=True)
    return round(found, 4)


def rounded(seconds: Sequence[float]) -> list[float]:
    return [round(each, 4) for each in seconds]


if __name__ == "__main__":
    sys.exit(main())
