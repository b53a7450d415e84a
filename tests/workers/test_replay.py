"""A device that computes a little wrong is found by replicas that compute the same, and named where three compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.workers import replays, runs
from tests.workers.replays import Way
from workers.spec import RunSpec

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("layout", "spoiled", "suspected"),
    [
        ({"dp": 4}, 2, "suspected is rank 2"),
        ({"dp": 2}, 1, "suspected are ranks 0, 1"),
        ({"dp": 4, "replicate": 2, "zero": 3}, 3, "suspected is rank 3"),
        ({"dp": 3, "replicate": 3, "zero": 2}, 0, "suspected is rank 0"),
        ({"dp": 3, "pp": 2}, 4, "suspected is rank 4"),  # of the second stage
        ({"dp": 3, "tp": 2}, 3, "suspected are ranks 2, 3"),  # what one sends, both have
        ({"dp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"}, 0, "suspected are ranks 0, 1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_who_errs_is_found(pool: Pool, layout: dict[str, Any], spoiled: int, suspected: str, way: Way) -> None:
    layer = 3 if layout.get("pp") == 2 and spoiled == 4 else 2
    said = pool.run(run_of(layout).parallel.world, replays.replayed, run_of(layout), (spoiled,), layer, way)
    what = "the result of layer" if way == "forward" else "the gradient from layer"
    assert {tuple(each) for each in said} == {("None", f"{what} {layer}, {suspected}", "[]")}


@pytest.mark.parametrize(
    "layout", [{"dp": 3}, {"dp": 2, "pp": 2}, {"dp": 3, "tp": 2, "zero": 3}, {"dp": 2, "pp": 2, "schedule": "gpipe"}]
)
def test_nothing_is_changed_by_a_replay(pool: Pool, layout: dict[str, Any]) -> None:
    run = run_of(layout, global_batch=7)  # replicas have different numbers of micro-batches
    plain = pool.run(run.parallel.world, runs.steps, run, 3)
    assert pool.run(run.parallel.world, replays.between_steps, run, 3) == plain


def test_the_run_stops_and_says_since_when(pool: Pool, tmp_path: Path) -> None:
    run = run_of({"dp": 3}, steps=9, replay_every=3, global_batch=6)
    raised = pool.run(3, replays.train, str(tmp_path), run, 2)
    assert [suspected for _, suspected in raised] == [False, False, True]
    message = (
        "after step 3 replicas computed the same and got different figures: the result of layer 1, suspected is rank 2"
        "; they have never agreed"
    )
    assert {said for said, _ in raised} == {message}


def test_a_sound_run_ends(pool: Pool, tmp_path: Path) -> None:
    run = run_of({"dp": 2}, steps=4, replay_every=2, global_batch=4)
    assert pool.run(2, runs.train, str(tmp_path), run, 1, ())


def test_experts_that_replicas_share_are_refused() -> None:
    model = {"experts": {"count": 4, "top_k": 2, "hidden": 16}}
    with pytest.raises(ValueError, match="replay_every compares replicas, which have the experts between them at ep 2"):
        runs.spec(layout={"dp": 2, "ep": 2}, model=model, train={"replay_every": 10})


def run_of(layout: dict[str, Any], **train: Any) -> RunSpec:
    return runs.spec(layout=layout, train=train)
