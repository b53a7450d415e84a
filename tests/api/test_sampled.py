"""`phalanx data at`: the samples of a step, as ranks had them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from service.contracts.job import Phase, parse_job
from service.store.records import Changes, MetricRow
from tests.api.commands import Run
from tests.api.world import World
from workers.data.reading import Reading
from workers.spec import ParallelLayout

LAYOUT = ParallelLayout(dp=3, tp=2)


def trained(world: World, place: Path) -> str:
    """A job of two sources whose second attempt did step 5, after eight samples were left out."""
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name}{number} " * 9}) for number in range(40)]
        (place / f"{name}.jsonl").write_text("\n".join(lines))
    sources = [{"source": f"{place}/a.jsonl", "weight": 3}, {"source": f"{place}/b.jsonl"}]
    uid = world.submit({"data": {"sources": sources}, "model.seq_len": 16, "train.global_batch": 8}).uid
    placed = {"attempt": 2, "layout": str(LAYOUT), "parallel": LAYOUT.model_dump(mode="json")}
    metrics = [MetricRow(uid, step, 2, 1.0, {"loss": 1.0, "samples": 8 * step + 8}) for step in (4, 5)]
    events = [(uid, 1.0, "GangPlaced", "", {"layout": "old"}), (uid, 2.0, "GangPlaced", "", placed)]
    world.store.commit(world.epoch or 0, Changes(events=events, metrics=metrics))
    world.move(uid, Phase.RUNNING)
    return uid


def told(run: Run, *words: str) -> list[dict[str, Any]]:
    done = run("data", "at", *words, "--json")
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_samples_of_a_step_are_what_ranks_were_given(world: World, run: Run, tmp_path: Path) -> None:
    uid = trained(world, tmp_path)
    found = told(run, uid, "--step", "5")
    assert [one["number"] for one in found] == list(range(40, 48))
    assert [one["replica"] for one in found] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert told(run, uid, "--step", "5", "--rank", "3") == [one for one in found if one["replica"] == 1]
    spec = parse_job(world.store.job(uid).spec)
    inputs, _, _ = Reading(spec.data, spec.model.seq_len, spec.train.seed).rows(40, 8)
    assert [one["tokens"] for one in found] == inputs.tolist()
    assert {Path(one["source"]).name for one in found} == {"a.jsonl", "b.jsonl"}
    for one in found:
        row = "".join(map(chr, (token for token in one["tokens"] if token < 256)))
        assert one["text"] == row
        assert one["learned"] == 16


def test_a_table_for_people_and_what_is_not_known(world: World, run: Run, tmp_path: Path) -> None:
    uid = trained(world, tmp_path)
    assert "a.jsonl" in run("data", "at", uid, "--step", "5").stdout
    for words, says in (
        (("--step", "9"), "nothing is known of step 9"),
        (("--step", "5", "--rank", "6"), "there is no rank 6: dp 3 x"),
    ):
        done = run("data", "at", uid, *words)
        assert done.exit_code in (2, 3)
        assert says in done.output
    (tmp_path / "a.jsonl").unlink()
    done = run("data", "at", uid, "--step", "5")
    assert (done.exit_code, "does not exist" in done.output or "a.jsonl" in done.output) == (2, True)
