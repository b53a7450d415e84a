from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from service.contracts import events
from service.runtime.ear import ECHO_S, ROOT_S, AgentGone, Complete, Ear
from service.runtime.logs import Chunk
from service.runtime.node_agent import RankDied, Warm
from workers import reports

pytestmark = pytest.mark.ray

NODES = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}


def ear() -> Ear:
    return Ear("job", 2, 4, NODES)


def done(step: int) -> reports.StepDone:
    return reports.StepDone(step, 90.0 + step, 1.0, 0.5, 1e-3, tokens=256, samples=16 * step, step_s=0.25)


def completed(step: int) -> events.Step:
    return events.Step(step, 90.0 + step, 1.0, 0.5, 1e-3, tokens=256, samples=16 * step, step_s=0.25)


def shard(step: int, rank: int, index: str = "") -> reports.ShardSaved:
    return reports.ShardSaved(step, rank, index or f"{step}-{rank}", "d", 8, {"step": step}, 0.0)


def taken(step: int, rank: int) -> reports.SnapshotTaken:
    return reports.SnapshotTaken(step, rank, 100, 0.001)


def failed(rank: int, kind: Any, message: str = "bad", step: int = 3) -> reports.Failed:
    return reports.Failed(rank, kind, step, message, "Traceback")


SAID: list[tuple[list[Any], list[events.Event]]] = [
    ([], []),
    ([reports.Moved(1, "step", 3, 95.0)], []),
    ([Chunk(2, "n0", "logs/x", 3, 95.0)], []),
    ([reports.Resumed(0, None)], [events.GangResumed("job", 2, 0, None, 100.0)]),
    ([reports.Resumed(4, "m4")], [events.GangResumed("job", 2, 4, "m4", 100.0)]),
    ([reports.CheckpointRefused("m4", "torn")], [events.CheckpointRejected("job", 2, "m4", "torn", 100.0)]),
    ([reports.SaveFailed(4, 3, "disk full")], [events.SaveFailed("job", 2, 4, "rank 3: disk full", 100.0)]),
    (
        [reports.SaveFailed(step, rank, "away") for step, rank in ((4, 0), (4, 1), (8, 1), (4, 3), (8, 0))],
        [
            events.SaveFailed("job", 2, 4, "rank 0: away", 100.0),
            events.SaveFailed("job", 2, 8, "rank 1: away", 100.0),
        ],
    ),
    (  # a save that is delayed may fail later: both are told
        [reports.SaveDelayed(4, 1, "away"), reports.SaveDelayed(4, 0, "away"), reports.SaveFailed(4, 1, "away")],
        [
            events.SaveDelayed("job", 2, 4, "rank 1: away", 100.0),
            events.SaveFailed("job", 2, 4, "rank 1: away", 100.0),
        ],
    ),
    ([taken(5, rank) for rank in range(3)], []),  # one rank has none yet
    ([taken(5, rank) for rank in range(4)], [events.SnapshotHeld("job", 2, 5, 400, 100.0)]),
    (  # a rank that is ahead took the one before as well
        [taken(6, 0), *(taken(5, rank) for rank in (1, 2, 3))],
        [events.SnapshotHeld("job", 2, 5, 400, 100.0)],
    ),
    (
        [reports.SnapshotFailed(5, 2, "no room"), reports.SnapshotFailed(6, 1, "no room")],
        [events.SnapshotFailed("job", 2, 5, "rank 2: no room", 100.0)],
    ),
    ([reports.SnapshotRefused(5, "torn")], [events.SnapshotRefused("job", 2, 5, "torn", 100.0)]),
    (
        [done(3), reports.Recalled(((1, done(2)), (2, done(3)))), reports.Resumed(3, None)],
        [
            events.StepsCompleted("job", 2, (completed(3),), 100.0),
            events.StepsRecalled("job", 2, ((1, completed(2)), (2, completed(3))), 100.0),
            events.GangResumed("job", 2, 3, None, 100.0),
        ],
    ),
    (
        [done(1)],
        [events.StepsCompleted("job", 2, (events.Step(1, 91.0, 1.0, 0.5, 1e-3, 256, 16, 0.25),), 100.0)],
    ),
    (
        [reports.CheckpointRefused("m4", "torn"), reports.Resumed(2, "m2"), done(3)],
        [
            events.CheckpointRejected("job", 2, "m4", "torn", 100.0),
            events.GangResumed("job", 2, 2, "m2", 100.0),
            events.StepsCompleted("job", 2, (events.Step(3, 93.0, 1.0, 0.5, 1e-3, 256, 48, 0.25),), 100.0),
        ],
    ),
    (
        [reports.LossSpiked(5, 95.0, 9.0, 2.0, 2.5, (64, 80)), done(5)],
        [
            events.LossSpiked("job", 2, 5, 9.0, 2.0, 2.5, (64, 80), 100.0),
            events.StepsCompleted("job", 2, (completed(5),), 100.0),
        ],
    ),
    (
        [reports.StepSkipped(5, 95.0, "skip", "loss nan", (64, 65))],
        [events.StepSkipped("job", 2, 5, "skip", "loss nan", (64, 65), 100.0)],
    ),
    ([reports.Evaluated(4, 95.0, 2.5, 4096)], [events.Evaluated("job", 2, 4, 2.5, 4096, 100.0)]),
    (  # what is told of steps comes after them, and after a rollback they come again
        [
            done(3),
            reports.Evaluated(3, 95.0, 2.5, 4096),
            done(4),
            reports.StepSkipped(5, 95.0, "rollback", "nan"),
            reports.Resumed(2, "m2"),
            done(3),
        ],
        [
            events.StepsCompleted("job", 2, (completed(3),), 100.0),
            events.Evaluated("job", 2, 3, 2.5, 4096, 100.0),
            events.StepsCompleted("job", 2, (completed(4),), 100.0),
            events.StepSkipped("job", 2, 5, "rollback", "nan", (), 100.0),
            events.GangResumed("job", 2, 2, "m2", 100.0),
            events.StepsCompleted("job", 2, (completed(3),), 100.0),
        ],
    ),
    ([reports.Finished(0, 9)], []),
    ([failed(1, "user")], []),
    ([RankDied(1, 95.0)], []),
]


@pytest.mark.parametrize(("said", "heard"), SAID)
def test_what_follows_at_once(said: list[Any], heard: list[events.Event]) -> None:
    assert ear().hear(said, 100.0) == heard


@pytest.mark.parametrize("order", [(1, 2, 3), (2, 1, 3), (3, 2, 1)])
def test_steps_of_one_delivery_are_one_event_in_order(order: tuple[int, ...]) -> None:
    said = [what for step in order for what in (done(step), reports.Moved(0, "step", step, 95.0))]
    (event,) = ear().hear(said, 100.0)
    assert isinstance(event, events.StepsCompleted)
    assert [step.step for step in event.steps] == [1, 2, 3]


def test_a_step_is_told_field_by_field() -> None:
    assert [field.name for field in dataclasses.fields(events.Step)] == [
        field.name for field in dataclasses.fields(reports.StepDone)
    ]


FAULTS = [
    # what is said, the fault that it is, and for how long its echoes, or its root, are waited for
    (failed(1, "user"), events.Fault("user", "bad", 1, "n0", 3, "Traceback"), ECHO_S),
    (failed(3, "numeric"), events.Fault("numeric", "bad", 3, "n1", 3, "Traceback"), ECHO_S),
    (
        failed(3, "numeric", "NonFinite: Drifted: x"),
        events.Fault("numeric", "NonFinite: Drifted: x", 3, "n1", 3, "Traceback"),
        ECHO_S,
    ),
    (failed(3, "drift", "Drifted: x"), events.Fault("drift", "Drifted: x", 3, "n1", 3, "Traceback"), ECHO_S),
    (
        failed(3, "corruption", "Corrupted: x"),
        events.Fault("corruption", "Corrupted: x", 3, "n1", 3, "Traceback"),
        ECHO_S,
    ),
    (failed(3, "user", "Drifted: x"), events.Fault("user", "Drifted: x", 3, "n1", 3, "Traceback"), ECHO_S),
    (failed(3, "storage"), events.Fault("storage", "bad", 3, "n1", 3, "Traceback"), ECHO_S),
    (RankDied(3, 95.0), events.Fault("process_died", "process of rank 3 is gone", 3, "n1", 0), 0.0),
    (
        RankDied(3, 95.0, out_of_memory=True, used=3 << 30),
        events.Fault("out_of_memory", "the kernel ended rank 3 for want of memory when it had 3.00 GiB", 3, "n1", 0),
        0.0,
    ),
    (
        RankDied(3, 95.0, out_of_memory=True),
        events.Fault("out_of_memory", "the kernel ended rank 3 for want of memory", 3, "n1", 0),
        0.0,
    ),
    (failed(2, "peer"), events.Fault("peer", "bad", 2, "n1", 3, "Traceback"), ROOT_S),
    (AgentGone("job", 2, "n1", "silent"), events.Fault("process_died", "silent", None, "n1", 0), ROOT_S),
]


@pytest.mark.parametrize(("said", "fault", "wait"), FAULTS)
def test_a_fault_is_told_after_its_echoes(said: Any, fault: events.Fault, wait: float) -> None:
    listening = ear()
    assert listening.hear([said], 100.0) == []
    if wait:
        assert listening.due(100.0) == []
        assert listening.due(100.0 + wait - 0.01) == []
    assert listening.due(100.0 + wait + 0.01) == [events.GangFaulted("job", 2, (fault,), 100.0 + wait + 0.01)]


@pytest.mark.parametrize("echo", [failed(0, "peer"), AgentGone("job", 2, "n0", "silent")])
def test_an_echo_is_told_as_soon_as_its_root_is_known(echo: Any) -> None:
    listening = ear()
    listening.hear([echo], 100.0)
    assert listening.due(100.0 + ROOT_S / 2) == []
    listening.hear([RankDied(3, 100.0)], 100.0 + ROOT_S / 2)
    (told,) = listening.due(100.0 + ROOT_S / 2)
    assert isinstance(told, events.GangFaulted)
    assert [fault.node for fault in told.faults] == ["n0", "n1"]


def test_all_evidence_of_the_moment_is_told_once() -> None:
    listening = ear()
    listening.hear([failed(0, "peer")], 100.0)
    listening.hear([failed(1, "peer"), RankDied(3, 100.1)], 100.2)
    (told,) = listening.due(101.0)
    assert isinstance(told, events.GangFaulted)
    assert [(fault.kind, fault.rank) for fault in told.faults] == [("peer", 0), ("peer", 1), ("process_died", 3)]
    listening.hear([failed(2, "peer")], 101.1)
    assert listening.due(102.0 + ROOT_S) == []


def test_ranks_that_were_paused_are_over_together_once_all_is_published() -> None:
    listening = ear()
    assert listening.hear([reports.Paused(rank, 7) for rank in range(3)], 100.0) == []
    assert listening.due(100.0) == []
    listening.hear([reports.Paused(3, 7)], 101.0)
    assert listening.due(101.0, publishing=True) == []
    assert listening.due(101.0) == [events.GangPaused("job", 2, 7, 101.0)]
    assert listening.due(102.0) == []


def test_a_slow_node_is_named_once() -> None:
    listening = ear()
    told = []
    for second in range(20):
        beats = [reports.Moved(rank, "step", second, 95.0, 2.0 if rank > 1 else 1.0) for rank in range(4)]
        told += listening.hear(beats, 100.0 + second)
    assert told == [events.StragglerFound("job", 2, "n1", 3, 2, 2.0, 107.0)]


def test_standbys_are_counted_over_nodes() -> None:
    listening = ear()
    assert listening.hear([Warm("n0", 2)], 100.0) == [events.StandbysWarm("job", 2, 2, 100.0)]
    assert listening.hear([Warm("n1", 1), Warm("n0", 1)], 101.0) == [
        events.StandbysWarm("job", 2, 3, 101.0),
        events.StandbysWarm("job", 2, 2, 101.0),
    ]


def test_an_agent_that_is_gone_leaves_the_last_step_of_the_gang() -> None:
    listening = ear()
    listening.hear([reports.Moved(0, "step", 7, 95.0), reports.Moved(3, "step", 6, 95.0)], 99.0)
    listening.hear([AgentGone("job", 2, "n1", "silent")], 100.0)
    (told,) = listening.due(101.0 + ROOT_S)
    assert isinstance(told, events.GangFaulted)
    assert [(fault.node, fault.step) for fault in told.faults] == [("n1", 7)]


@pytest.mark.parametrize(
    ("moves", "step"),
    [([], 0), ([("start", -1)], 0), ([("load", -1), ("step", 5)], 5), ([("step", 5), ("step", 6)], 6)],
)
def test_a_dead_rank_has_its_last_step_and_its_node(moves: list[tuple[Any, int]], step: int) -> None:
    listening = ear()
    listening.hear([reports.Moved(2, phase, number, 95.0) for phase, number in moves], 99.0)
    listening.hear([reports.Moved(1, "step", 9, 95.0), RankDied(2, 100.0)], 100.0)
    (told,) = listening.due(101.0)
    assert isinstance(told, events.GangFaulted)
    assert [(fault.rank, fault.node, fault.step) for fault in told.faults] == [(2, "n1", step)]


COMPLETE: list[tuple[list[tuple[int, int]], list[int]]] = [
    # (step, rank) of the shards heard; steps of the checkpoints that are complete
    ([(5, 0), (5, 1), (5, 2)], []),
    ([(5, 3), (5, 1), (5, 0), (5, 2)], [5]),
    ([(5, 0), (5, 0), (5, 1), (5, 2), (5, 2)], []),
    ([(5, 0), (5, 1), (5, 2), (5, 3), (5, 0), (5, 1), (5, 2), (5, 3)], [5]),
    ([(5, 0), (9, 0), (5, 1), (9, 1), (5, 2), (9, 2), (5, 3), (9, 3)], [5, 9]),
    ([(5, 0), (5, 1), (5, 2), (9, 0), (9, 1), (9, 2), (9, 3), (5, 3)], [9]),
]


@pytest.mark.parametrize(("heard", "complete"), COMPLETE)
def test_a_checkpoint_is_complete_once_when_every_rank_has_saved(
    heard: list[tuple[int, int]], complete: list[int]
) -> None:
    together, one_by_one, found = ear(), ear(), []
    together.hear([shard(step, rank) for step, rank in heard], 100.0)
    for step, rank in heard:
        one_by_one.hear([shard(step, rank)], 100.0)
        found += one_by_one.take_complete()
    expected = [Complete(step, tuple(shard(step, rank) for rank in range(4))) for step in complete]
    assert together.take_complete() == found == expected
    assert together.take_complete() == []


def test_the_first_of_two_records_of_a_rank_counts() -> None:
    listening = ear()
    listening.hear([shard(5, 0, "first"), shard(5, 0, "second"), *(shard(5, rank) for rank in (1, 2, 3))], 100.0)
    (complete,) = listening.take_complete()
    assert [record.index for record in complete.records] == ["first", "5-1", "5-2", "5-3"]


def test_nothing_is_kept_of_checkpoints_that_are_complete() -> None:
    listening = ear()
    for step in range(1, 100):
        listening.hear([shard(step, rank) for rank in range(4 if step % 3 else 2)], 100.0)
        listening.take_complete()
    assert set(listening.shards) == {99}


def test_the_end_is_told_once_when_all_have_finished() -> None:
    listening = ear()
    listening.hear([reports.Finished(rank, 9) for rank in (0, 1, 1, 2)], 100.0)
    assert listening.due(101.0) == []
    listening.hear([reports.Finished(3, 9)], 102.0)
    assert listening.due(102.0) == [events.GangFinished("job", 2, 102.0)]
    assert listening.due(103.0) == []


def test_the_end_waits_for_the_last_checkpoint() -> None:
    listening = ear()
    said = [what for rank in range(4) for what in (shard(9, rank), reports.Finished(rank, 9))]
    listening.hear(said, 100.0)
    assert listening.due(100.0) == []
    assert [complete.step for complete in listening.take_complete()] == [9]
    assert listening.due(100.1, publishing=True) == []
    assert listening.due(100.2) == [events.GangFinished("job", 2, 100.2)]


def test_a_rank_that_is_lost_while_others_finish_is_a_fault() -> None:
    listening = ear()
    listening.hear([*(reports.Finished(rank, 9) for rank in range(3)), RankDied(3, 100.0)], 100.0)
    assert [type(event) for event in listening.due(101.0)] == [events.GangFaulted]
