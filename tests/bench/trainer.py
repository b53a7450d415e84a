"""Our trainer's step against a minimal torch loop of the same model and layout, on gloo, fp32, one thread a rank.

`python tests/bench/trainer.py`. Both live in the same processes and take their steps in turn, so that what else runs
on the machine hits both. A ratio is ours over theirs in steps a second, of medians: above 1, ours is faster.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from tests.bench import race
from tests.pool import Pool
from workers.spec import RunSpec

LAYOUTS = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2, "sequence_parallel": False},
    "pp2": {"pp": 2},
    "2x2x2": {"dp": 2, "tp": 2, "pp": 2, "sequence_parallel": False},
}
"""Without sequence parallelism, which the loop hasn't: it sums where we would gather and scatter."""
SIZES = {
    # layers, hidden, heads, kv heads, ffn, sequence, vocabulary, samples a step, a micro-batch
    "full": (8, 256, 8, 4, 688, 256, 1024, 16, 2),
    "tiny": (2, 32, 4, 2, 48, 16, 64, 8, 2),
}
TOLERANCE = 1e-4  # relative, of losses and norms that have to be the same


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    members = Pool(max(spec(options.size, layout).parallel.world for layout in LAYOUTS.values()))
    try:
        found = {name: compared(members, name, options) for name in options.layouts}
    finally:
        members.end()
    if options.json:
        ratios = {f"ratio_{name}": figures["ratio"] for name, figures in found.items()}
        print(json.dumps({**ratios, "layouts": found, "size": options.size, "rounds": options.rounds}))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="end with one line of JSON")
    made.add_argument("--size", choices=SIZES, default="full")
    made.add_argument("--rounds", type=int, default=7, help="steps that count, of each")
    made.add_argument("--warm", type=int, default=2, help="steps before those")
    made.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    return made


def spec(size: str, layout: dict[str, Any]) -> RunSpec:
    layers, hidden, heads, kv_heads, ffn_hidden, seq_len, vocab_size, batch, micro_batch = SIZES[size]
    return RunSpec.model_validate({
        "model": {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn_hidden": ffn_hidden,
                  "seq_len": seq_len, "vocab_size": vocab_size},
        "data": {},
        "train": {"steps": 1000, "global_batch": batch, "precision": "fp32", "decay": "constant"},
        "parallel": {**layout, "micro_batch": micro_batch},
    })  # fmt: skip


def compared(members: Pool, name: str, options: argparse.Namespace) -> dict[str, Any]:
    run = spec(options.size, LAYOUTS[name])
    before = os.getloadavg()[0]
    ranks = members.run(run.parallel.world, race.run, run, options.rounds, options.warm, timeout_s=600.0)
    load = [round(before, 1), round(os.getloadavg()[0], 1)]
    ours, theirs = measured(ranks, "ours"), measured(ranks, "theirs")
    for pair in zip(ours["outcomes"], theirs["outcomes"], strict=True):
        if not all(math.isclose(*figures, rel_tol=TOLERANCE) for figures in zip(*pair, strict=True)):
            raise AssertionError(f"{name}: not the same training: (loss, norm) {pair[0]} here, {pair[1]} in the loop")
    ratio, core = theirs["step_s"] / ours["step_s"], theirs["core_s"] / ours["core_s"]
    print(
        f"{name:6} ours {told(ours)}  theirs {told(theirs)}  ratio {ratio:.3f}, cores {core:.3f}  load {load}",
        flush=True,
    )
    kept = {f"{side}_{key}": figures[key] for side, figures in (("ours", ours), ("theirs", theirs)) for key in KEPT}
    return {"ratio": round(ratio, 4), "core_ratio": round(core, 4), **kept, "load": load}


KEPT = ("step_s", "range_s", "core_s")


def measured(ranks: list[dict[str, Any]], side: str) -> dict[str, Any]:
    """Medians: of a step's seconds, and of the core seconds of all ranks together, which load disturbs less."""
    seconds = ranks[0][side]["seconds"]
    core = [sum(each) for each in zip(*(rank[side]["core"] for rank in ranks), strict=True)]
    return {
        "step_s": round(statistics.median(seconds), 4),
        "range_s": [round(min(seconds), 4), round(max(seconds), 4)],
        "core_s": round(statistics.median(core), 4),
        "outcomes": ranks[0][side]["outcomes"],
    }


def told(figures: dict[str, Any]) -> str:
    low, high = figures["range_s"]
    return f"{figures['step_s']:.3f} s ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    sys.exit(main())
