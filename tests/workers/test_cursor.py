"""The cursor and its ledger: over attempts and walks back, each sample is counted once."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from workers.checkpoint.manifest import BadCheckpoint, Manifest
from workers.cursor import RECENT, Cursor, check_model, check_order
from workers.reports import StepDone
from workers.spec import DataSpec, ModelSpec, RunSpec, TrainSpec

RUN = RunSpec(
    model=ModelSpec(layers=1, hidden=8, heads=2, seq_len=8),
    data=DataSpec(),
    train=TrainSpec(steps=9, seed=7, precision="fp32"),
)
PROGRESS = {"optimizer": {"name": "adamw", "steps": 2}, "scaler": {}}


def checkpoint(header: dict[str, Any]) -> Manifest:
    """A manifest that has only a header, through JSON as a real one."""
    return Manifest("job-1", 3, 1, "token", 0.0, {}, {}, json.loads(json.dumps(header)), (), {})


def advanced(cursor: Cursor, steps: int, batch: int) -> Cursor:
    for _ in range(steps):
        cursor.advance(batch)
    return cursor


def test_the_first_attempt() -> None:
    cursor = advanced(Cursor(1), 3, 8)
    assert (cursor.step, cursor.samples) == (3, 24)
    assert cursor.ledger == [{"attempt": 1, "start": 0, "end": 24}]


def test_what_a_checkpoint_keeps() -> None:
    assert advanced(Cursor(1), 2, 8).header(RUN, PROGRESS) == {
        "step": 2,
        "samples": 16,
        "ledger": [{"attempt": 1, "start": 0, "end": 16}],
        "losses": [],
        "evaluated": {"best": None, "worse": 0},
        "seed": 7,
        "data": {
            "source": "builtin:topics",
            "sources": None,
            "packing": "none",
            "format": "text",
            "template": "auto",
            "tokenizer": "byte",
            "text_field": "text",
        },
        "precision": "fp32",
        **PROGRESS,
    }


# (steps of the attempt, its batch, steps before its end at which its last checkpoint was made)
HISTORIES = {
    "no loss": [(3, 8, 0), (2, 8, 0), (4, 8, 0)],
    "steps redone": [(5, 8, 2), (3, 8, 1), (6, 8, 0)],
    "an attempt without a checkpoint": [(4, 8, 1), (2, 8, 2), (3, 8, 0)],
    "another batch": [(3, 8, 0), (3, 12, 1), (2, 4, 0)],
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_each_sample_is_counted_once_over_attempts(history: list[tuple[int, int, int]]) -> None:
    header = Cursor(0).header(RUN, PROGRESS)
    for attempt, (steps, batch, lost) in enumerate(history, 1):
        cursor = Cursor.resumed(checkpoint(header), attempt)
        before = cursor.samples
        header = advanced(cursor, steps - lost, batch).header(RUN, PROGRESS)
        assert header["samples"] == before + (steps - lost) * batch
    ledger = header["ledger"]
    assert [entry["start"] for entry in ledger] == [0, *(entry["end"] for entry in ledger[:-1])]
    assert ledger[-1]["end"] == header["samples"]
    assert all(entry["start"] < entry["end"] for entry in ledger)
    assert len({entry["attempt"] for entry in ledger}) == len(ledger)


def test_what_nobody_has_heard_of_is_remembered() -> None:
    cursor = Cursor(1)
    for step in range(1, 101):
        cursor.remember(StepDone(step, 0.0, 1.0, 1.0, 1e-3, 8, 8 * step, 0.1))
        cursor.heard(min(step, 40))
    assert [done.step for _, done in cursor.recent] == list(range(41, 101))
    cursor.heard(99)
    assert [done.step for _, done in cursor.recent] == list(range(69, 101))  # a few are kept all the same
    cursor.heard(20)
    assert len(cursor.recent) == RECENT


@pytest.mark.parametrize(
    ("metrics", "margin", "best", "worse"),
    [
        ([2.0, 1.5, 1.75], 0.0, (2, 1.5), 1),
        ([2.0, 1.5, 1.0], 0.75, (3, 1.0), 0),
        ([2.0, 2.0], 0.0, (1, 2.0), 1),
        ([math.nan, 3.0, math.inf], 0.0, (2, 3.0), 1),
        ([math.nan], 0.0, None, 1),
    ],
)
def test_which_evaluation_is_best(
    metrics: list[float], margin: float, best: tuple[int, float] | None, worse: int
) -> None:
    cursor = Cursor(1)
    for step, metric in enumerate(metrics, 1):
        cursor.step = step
        assert cursor.judge(metric, margin) == (cursor.best == (step, metric))
    assert (cursor.best, cursor.worse) == (best, worse)
    again = Cursor.resumed(checkpoint(cursor.header(RUN, PROGRESS)), 2)
    assert (again.best, again.worse) == (best, worse)


def test_a_header_is_a_copy() -> None:
    cursor = advanced(Cursor(1), 1, 8)
    header = cursor.header(RUN, PROGRESS)
    cursor.advance(8)
    assert header["ledger"] == [{"attempt": 1, "start": 0, "end": 8}]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"samples": None}, "TypeError"),
        ({"step": "three"}, "ValueError"),
        ({"ledger": [{"attempt": 1, "start": 0}]}, "KeyError('end')"),
        ({"ledger": None}, "TypeError"),
    ],
)
def test_a_header_that_is_not_whole_condemns_its_checkpoint(change: dict[str, Any], reason: str) -> None:
    header = advanced(Cursor(1), 3, 8).header(RUN, PROGRESS) | change
    with pytest.raises(BadCheckpoint) as caught:
        Cursor.resumed(checkpoint(header), 2)
    assert caught.value.manifest == "manifests/0000000003-000001.json"
    assert caught.value.reason.startswith(f"its header is not whole: {reason}")


def test_a_header_without_a_field_condemns_its_checkpoint() -> None:
    header = advanced(Cursor(1), 3, 8).header(RUN, PROGRESS)
    del header["ledger"]
    with pytest.raises(BadCheckpoint, match=r"its header is not whole: KeyError\('ledger'\)"):
        Cursor.resumed(checkpoint(header), 2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train": TrainSpec(steps=9, seed=8)}, "seed 7, now 8"),
        ({"data": DataSpec(source="/other.txt")}, "source 'builtin:topics', now '/other.txt'"),
    ],
)
def test_samples_of_another_order_are_refused(changes: dict[str, Any], told: str) -> None:
    document = checkpoint(advanced(Cursor(1), 2, 8).header(RUN, PROGRESS))
    check_order(document, RUN)
    with pytest.raises(ValueError, match=told):
        check_order(document, RUN.model_copy(update=changes))


@pytest.mark.parametrize(
    ("data", "model"),
    [
        ({"sources": [{"source": "a.txt", "weight": 3}, {"source": "b.txt"}], "packing": "documents"}, {}),
        ({"source": "a.jsonl", "format": "chat", "packing": "documents"}, {"lora": {"targets": ["wq", "down"]}}),
        ({}, {"experts": {"count": 4, "top_k": 2, "hidden": 8}}),
    ],
)
def test_a_run_continues_at_its_own_checkpoint(data: dict[str, Any], model: dict[str, Any]) -> None:
    spec = ModelSpec.model_validate({**RUN.model.model_dump(), **model})
    run = RunSpec(model=spec, data=DataSpec.model_validate(data), train=RUN.train)
    document = checkpoint(advanced(Cursor(1), 2, 8).header(run, PROGRESS))
    check_order(document, run)
    check_model(dataclasses.replace(document, model=json.loads(json.dumps(spec.model_dump()))), run)


def test_a_checkpoint_of_before_there_was_packing_was_not_packed() -> None:
    header = advanced(Cursor(1), 2, 8).header(RUN, PROGRESS)
    del header["data"]["packing"]
    document = checkpoint(header)
    check_order(document, RUN)
    with pytest.raises(ValueError, match="packing 'none', now 'documents'"):
        check_order(document, RUN.model_copy(update={"data": DataSpec(packing="documents")}))


def test_another_model_of_the_same_shapes_is_refused() -> None:
    document = Manifest("job-1", 3, 1, "token", 0.0, {}, RUN.model.model_dump(), {}, (), {})
    check_model(document, RUN)
    check_model(document, RUN.model_copy(update={"model": RUN.model.model_copy(update={"seq_len": 4})}))
    with pytest.raises(ValueError, match=r"another model \(rope_theta 10000.0, now 500000.0\)"):
        check_model(document, RUN.model_copy(update={"model": RUN.model.model_copy(update={"rope_theta": 500_000.0})}))
