from __future__ import annotations

import pytest

from service.contracts.cluster import Fleet
from service.contracts.job import JobSpec, Phase
from service.core import queue
from service.core.state import Job, Placement, Slot
from tests.service.core import world


def job(uid: str, seq: int = 1, phase: Phase = Phase.QUEUED, spec: JobSpec | None = None, slots: str = "") -> Job:
    """`slots` are held, as `0:1` for index 1 of node 0."""
    pairs = [slot.split(":") for slot in slots.split()]
    held = Placement(tuple(Slot(f"id{node}", f"n{node}", int(index)) for node, index in pairs))
    return Job(uid, seq, spec or world.spec(name=uid), 0.0, phase, placement=held if pairs else None)


def test_order_is_recovering_first_then_submission() -> None:
    jobs = [
        job("c", 3), job("a", 1), job("d", 9, Phase.RECOVERING), job("e", 5, Phase.RECOVERING, slots="0:0"),
        job("r", 0, Phase.RUNNING, slots="0:1"), job("x", 2, Phase.CANCELLED),
    ]  # fmt: skip
    assert [one.uid for one in queue.order(jobs, {})] == ["e", "d", "a", "c"]


def test_priority_of_the_queue_goes_before_that_of_the_job_and_both_before_time() -> None:
    jobs = [
        job(uid, number, spec=world.job_spec(queue=name, priority=priority))
        for number, (uid, name, priority) in enumerate(
            [("a", "default", 0), ("b", "default", 5), ("c", "night", 9), ("d", "now", -3), ("e", "default", 5)]
        )
    ]
    jobs.append(job("f", 9, Phase.RECOVERING))
    assert [one.uid for one in queue.order(jobs, {"now": 1, "night": -1})] == ["d", "b", "e", "f", "a", "c"]


def test_taken_is_all_that_is_held() -> None:
    jobs = [job("a", slots="0:0 1:1"), job("b"), job("c", slots="0:1")]
    assert queue.taken(jobs) == {("id0", 0), ("id1", 1), ("id0", 1)}


@pytest.mark.parametrize(
    ("fleet", "held", "need", "sentence"),
    [
        (world.fleet(4), {"job-x": "0:0 0:1 1:0 1:1"}, 4, None),
        (world.fleet(4), {"job-x": "0:0 0:1 1:0 1:1"}, 8, "needs 8 slots; 4 of 8 are free, 4 held by job-x"),
        (world.fleet(2), {}, 8, "needs 8 slots; 4 of 4 are free"),
        (Fleet(), {}, 8, "needs 8 slots; the fleet has no cpu node"),
        (world.fleet(2, device="gpu"), {}, 1, "needs 1 slots; the fleet has no cpu node"),
        (world.fleet(2), {"a": "0:0", "b": "1:0 1:1"}, 2,
         "needs 2 slots; 1 of 4 are free, 2 held by b, 1 by a"),
        (world.fleet(3), {name: f"{i // 2}:{i % 2}" for i, name in enumerate("abcde")}, 2,
         "needs 2 slots; 1 of 6 are free, 1 held by a, 1 by b, 1 by c, 2 by 2 more"),
        (world.fleet(1), {"a": "0:0 9:0"}, 2,  # node 9 is gone
         "needs 2 slots; 1 of 2 are free, 1 held by a"),
    ],
)  # fmt: skip
def test_shortage_counts(fleet: Fleet, held: dict[str, str], need: int, sentence: str | None) -> None:
    jobs = [job(uid, phase=Phase.RUNNING, slots=slots) for uid, slots in held.items()]
    assert queue.shortage(job("w", spec=world.spec(slots=need)), jobs, fleet) == sentence
