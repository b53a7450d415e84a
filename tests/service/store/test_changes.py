from __future__ import annotations

import dataclasses
from types import MappingProxyType

import pytest
from sqlalchemy.exc import IntegrityError

from service.contracts.errors import NotFound
from service.store.jobs import Store
from service.store.records import (
    Changes,
    CheckpointRow,
    JobUpdate,
    LogChunk,
    LogChunkRow,
    MetricRow,
    NodeRow,
)


@pytest.fixture
def epoch(store: Store, submit) -> int:
    """The lease, and a job `a`."""
    submit("a")
    epoch = store.acquire("me", 60)
    assert epoch is not None
    return epoch


def metric(step: int, attempt: int, loss: float = 1.0) -> MetricRow:
    return MetricRow("a", step, attempt, at=float(step), values={"loss": loss})


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"jobs": [JobUpdate("x", "running", "", {}, {})]}, NotFound),
        ({"nodes": [NodeRow("n", "n", 1, "", "", "cpu", "", 1.0)] * 2}, IntegrityError),
        ({"intents_done": [object()]}, Exception),
        ({"events": [("a", 1.0, "Bad", "", {"what": object()})]}, Exception),
    ],
)
def test_one_bad_row_leaves_nothing(store: Store, epoch: int, bad: dict, error: type[Exception]) -> None:
    good = Changes(
        jobs=[JobUpdate("a", "running", "", {}, {})],
        metrics=[metric(1, 1)],
        events=[("a", 1.0, "Good", "", {})],
    )
    both = {name: [*getattr(good, name), *rows] if name != "nodes" else rows for name, rows in bad.items()}
    before = store.job("a"), store.events(None, after=0)
    with pytest.raises(error):
        store.commit(epoch, Changes(**{"jobs": good.jobs, "metrics": good.metrics, "events": good.events} | both))
    assert (store.job("a"), store.events(None, after=0)) == before
    assert store.metrics("a", after_step=0) == []
    store.commit(epoch, good)
    assert [event.id for event in store.events(None, after=0)] == [1, 2]


def test_what_is_told_of_a_job_that_was_removed_is_dropped_and_the_rest_is_kept(store: Store, epoch: int) -> None:
    gone = Changes(
        events=[("a", 1.0, "Good", "", {}), ("x", 1.0, "Late", "", {})],
        checkpoints=[CheckpointRow("x", 1, 1, "m", 1.0)],
        log_chunks=[LogChunk("x", 1, "n", "p", 1, 1.0)],
        metrics=[metric(1, 1), MetricRow("x", 1, 1, 1.0, {"loss": 1.0})],
    )
    store.commit(epoch, gone)
    assert [event.type for event in store.events(None, after=0)][-1] == "Good"
    assert [row.step for row in store.metrics("a", after_step=0)] == [1]
    assert (store.checkpoints("x"), store.log_chunks("x", 0), store.metrics("x", 0)) == ([], [], [])


@pytest.mark.parametrize(
    ("commits", "kept"),
    [
        ([[(1, 1, 0.5)], [(1, 2, 0.7)]], (2, 0.7)),  # a later attempt does the step again
        ([[(1, 2, 0.5)], [(1, 1, 0.7)]], (2, 0.5)),  # an old attempt's late word
        ([[(1, 1, 0.5), (1, 2, 0.7)]], (2, 0.7)),  # both at once
        ([[(1, 2, 0.5), (1, 1, 0.7)]], (2, 0.5)),
        ([[(1, 1, 0.5)], [(1, 1, 0.7)]], (1, 0.7)),
    ],
)
def test_a_step_has_one_row(
    store: Store, epoch: int, commits: list[list[tuple[int, int, float]]], kept: tuple[int, float]
) -> None:
    for rows in commits:
        store.commit(epoch, Changes(metrics=[metric(*row) for row in rows]))
    (row,) = store.metrics("a", after_step=0)
    assert (row.attempt, row.values["loss"]) == kept


def test_what_is_recalled_says_nothing_new_of_a_step_that_is_known(store: Store, epoch: int) -> None:
    store.commit(epoch, Changes(metrics=[metric(1, 2), evaluation(1, 2, 0.5)]))
    recalled = [dataclasses.replace(metric(step, 1, 9.0), recalled=True) for step in (1, 2)]
    store.commit(epoch, Changes(metrics=[*recalled, metric(3, 2)]))
    found = [(row.step, row.attempt, row.values) for row in store.metrics("a", after_step=0)]
    assert found == [(1, 2, {"loss": 1.0, "eval_loss": 0.5}), (2, 1, {"loss": 9.0}), (3, 2, {"loss": 1.0})]


def evaluation(step: int, attempt: int, loss: float) -> MetricRow:
    return MetricRow("a", step, attempt, at=90.0, values={"eval_loss": loss}, beside=True)


@pytest.mark.parametrize(
    ("commits", "kept"),
    [
        ([[metric(1, 1), evaluation(1, 1, 0.5)]], {"loss": 1.0, "eval_loss": 0.5}),
        ([[metric(1, 1)], [evaluation(1, 1, 0.5)]], {"loss": 1.0, "eval_loss": 0.5}),
        ([[metric(1, 1)], [evaluation(1, 1, 0.5)], [evaluation(1, 1, 0.4)]], {"loss": 1.0, "eval_loss": 0.4}),
        ([[metric(1, 1)], [evaluation(1, 1, 0.5), evaluation(1, 1, 0.4)]], {"loss": 1.0, "eval_loss": 0.4}),
        # the step is done again, by a later attempt or by the same one, and evaluated again
        ([[metric(1, 1)], [evaluation(1, 1, 0.5)], [metric(1, 2, 2.0)]], {"loss": 2.0}),
        ([[metric(1, 1)], [evaluation(1, 1, 0.5)], [metric(1, 1, 2.0)]], {"loss": 2.0}),
        ([[metric(1, 1), evaluation(1, 1, 0.5), metric(1, 1, 2.0)]], {"loss": 2.0}),
        (
            [[metric(1, 1), evaluation(1, 1, 0.5)], [metric(1, 2, 2.0), evaluation(1, 2, 0.3)]],
            {"loss": 2.0, "eval_loss": 0.3},
        ),
        # an old attempt's late word
        ([[metric(1, 2)], [evaluation(1, 1, 0.5)]], {"loss": 1.0}),
        ([[metric(1, 2), evaluation(1, 1, 0.5)]], {"loss": 1.0}),
        ([[evaluation(1, 1, 0.5), metric(1, 2)]], {"loss": 1.0}),
        ([[metric(1, 1)], [evaluation(1, 1, float("nan"))]], {"loss": 1.0, "eval_loss": None}),
        ([[evaluation(1, 1, 0.5)]], None),  # of no step that is known
    ],
)
def test_an_evaluation_stands_beside_its_step(
    store: Store, epoch: int, commits: list[list[MetricRow]], kept: dict[str, float | None] | None
) -> None:
    for rows in commits:
        store.commit(epoch, Changes(metrics=rows))
    assert [row.values for row in store.metrics("a", after_step=0)] == ([] if kept is None else [kept])


def test_metrics_are_read_on_from_a_step(store: Store, epoch: int) -> None:
    store.commit(epoch, Changes(metrics=[metric(step, 1) for step in (3, 1, 2, 4)]))
    assert [row.step for row in store.metrics("a", after_step=1, limit=2)] == [2, 3]


def test_a_log_chunk_is_kept_once(store: Store, epoch: int) -> None:
    def chunk(path: str, attempt: int = 1) -> LogChunk:
        return LogChunk("a", attempt, "n1", path, lines=10, at=1.0)

    store.commit(epoch, Changes(log_chunks=[chunk("logs/1"), chunk("logs/2")]))
    store.commit(epoch, Changes(log_chunks=[chunk("logs/2"), chunk("logs/3", attempt=2)]))
    chunks = store.log_chunks("a", after=0)
    assert [one.path for one in chunks] == ["logs/1", "logs/2", "logs/3"]
    assert [one.id for one in chunks] == sorted({one.id for one in chunks})
    assert [one.path for one in store.log_chunks("a", after=chunks[0].id, limit=1)] == ["logs/2"]
    assert [one.path for one in store.log_chunks("a", after=0, attempt=2)] == ["logs/3"]
    store.commit(epoch, Changes(log_chunks=[LogChunkRow(0, "a", 2, "n1", "logs/4", 10, 1.0)]))
    assert store.log_chunks("a", after=chunks[-1].id)[0].path == "logs/4"


def test_a_checkpoint_once_rejected_stays_so(store: Store, epoch: int) -> None:
    published = CheckpointRow("a", 10, 1, "checkpoints/10/1", 2.0)
    newer = CheckpointRow("a", 20, 1, "checkpoints/20/1", 3.0)
    redone = CheckpointRow("a", 10, 2, "checkpoints/10/2", 4.0)
    rejected = CheckpointRow("a", 20, 1, "checkpoints/20/1", 3.0, rejected="block 3 of shard 0 is damaged")
    store.commit(epoch, Changes(checkpoints=[published, newer]))
    store.commit(epoch, Changes(checkpoints=[rejected, redone]))
    store.commit(epoch, Changes(checkpoints=[newer]))
    assert store.checkpoints("a") == [rejected, redone, published]


PUBLISHED = CheckpointRow("a", 10, 1, "m", 2.0, nbytes=512)
VERIFIED = CheckpointRow("a", 10, 1, "m", 5.0, verified_at=5.0)
REJECTED = CheckpointRow("a", 10, 1, "m", 6.0, rejected="torn")


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ([PUBLISHED], (2.0, None, 512, None)),
        ([PUBLISHED, VERIFIED], (2.0, None, 512, 5.0)),
        (
            [PUBLISHED, VERIFIED, dataclasses.replace(VERIFIED, published_at=9.0, verified_at=9.0)],
            (2.0, None, 512, 9.0),
        ),
        ([PUBLISHED, VERIFIED, REJECTED], (2.0, "torn", 512, 5.0)),
        ([PUBLISHED, VERIFIED, PUBLISHED], (2.0, None, 512, 5.0)),  # the word of it came twice
        ([PUBLISHED, REJECTED, VERIFIED], (2.0, "torn", 512, 5.0)),
        ([VERIFIED], (5.0, None, None, 5.0)),  # the word of its publication was lost
    ],
)
def test_what_is_told_of_a_checkpoint_adds_up(
    store: Store, epoch: int, told: list[CheckpointRow], kept: tuple[float, str | None, int | None, float | None]
) -> None:
    for row in told:
        store.commit(epoch, Changes(checkpoints=[row]))
    (row,) = store.checkpoints("a")
    assert (row.published_at, row.rejected, row.nbytes, row.verified_at) == kept


def test_nodes_are_replaced_only_when_given(store: Store, epoch: int) -> None:
    first, second = (NodeRow(id_, f"node-{id_}", 4, "r1", "z1", "cpu", "10.0.0.1", 1.0) for id_ in "xy")
    for nodes, kept in [
        ([second, first], [first, second]),
        (None, [first, second]),
        ([second], [second]),
        ([], []),
    ]:
        store.commit(epoch, Changes(nodes=nodes))
        assert store.nodes() == kept


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("loss is ∞ at step 3", "loss is ∞ at step 3"),
        ("half \ud800 a pair", "half ? a pair"),
        ("NUL \0 inside", "NUL � inside"),
    ],
)
def test_words_of_a_user_never_stop_a_commit(store: Store, epoch: int, given: str, kept: str) -> None:
    update = JobUpdate("a", "failed", given, {"incidents": [{"message": given}]}, {}, ended_at=2.0)
    store.commit(epoch, Changes(jobs=[update]))
    job = store.job("a")
    assert job.reason == kept
    assert job.status["incidents"][0]["message"] in (kept, given)
    assert "\ud800" not in job.status["incidents"][0]["message"]


def test_documents_may_be_read_only_and_hold_what_json_lacks(store: Store, epoch: int) -> None:
    data = MappingProxyType({"loss": float("inf"), "ranks": (1, 2), "inner": MappingProxyType({"x": float("nan")})})
    store.commit(epoch, Changes(events=[("a", 1.0, "X", "", data)]))
    assert store.events("a", after=1)[0].data == {"loss": None, "ranks": [1, 2], "inner": {"x": None}}


def test_what_is_held_against_nodes_is_replaced_only_when_given(store: Store, epoch: int) -> None:
    struck, excluded = {"strikes": [{"at": 1.0, "kind": "hang"}]}, {"excluded": "Xid 79"}
    for health, kept in [
        ({"n1": struck, "n0": excluded}, {"n0": excluded, "n1": struck}),
        (None, {"n0": excluded, "n1": struck}),
        ({"n1": excluded}, {"n1": excluded}),
        ({}, {}),
    ]:
        store.commit(epoch, Changes(health=health))
        assert store.health() == kept
