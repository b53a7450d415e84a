from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.contracts.errors import Conflict, NotFound
from service.store.jobs import KEY_KEPT_S, Store
from service.store.records import Changes, JobUpdate, Which


def ended(uid: str, phase: str = "succeeded") -> Changes:
    return Changes(jobs=[JobUpdate(uid, phase, "done", {"attempt": 1}, {"step": 9}, ended_at=5.0)])


def test_a_submitted_job_is_read_back_with_its_event(store: Store) -> None:
    job, created = store.submit({"train": {"steps": 2}}, "topics", uid="a", at=1.5, status={"attempt": 0})
    assert created
    assert (job.uid, job.seq, job.name, job.phase, job.created_at) == ("a", 1, "topics", "queued", 1.5)
    assert (job.spec, job.status, job.ended_at, job.cancel_requested) == (
        {"train": {"steps": 2}},
        {"attempt": 0},
        None,
        False,
    )
    assert store.job("a") == job
    assert [(event.job, event.type, event.at) for event in store.events(None, after=0)] == [("a", "JobSubmitted", 1.5)]


@pytest.mark.parametrize(
    ("key", "digest", "at", "expected"),
    [
        ("k", "d", 2.0, "a"),  # the same request again
        ("k", "other", 2.0, Conflict),
        ("k2", "d", 2.0, "b"),
        (None, "d", 2.0, "b"),
        ("k", "other", 1.0 + KEY_KEPT_S, "b"),  # the key is forgotten after a day
    ],
)
def test_a_key_makes_one_job(
    store: Store, key: str | None, digest: str, at: float, expected: str | type[Conflict]
) -> None:
    store.submit({}, "first", uid="a", at=1.0, status={}, key="k", digest="d")

    def again() -> tuple[str, bool]:
        job, created = store.submit({}, "second", uid="b", at=at, status={}, key=key, digest=digest)
        return job.uid, created

    if isinstance(expected, str):
        assert again() == (expected, expected == "b")
    else:
        with pytest.raises(expected, match="job a"):
            again()
    kept = {"a", expected} if isinstance(expected, str) else {"a"}
    assert {job.uid for job in store.jobs()} == kept
    assert len(store.events(None, after=0)) == len(kept)


def test_a_key_can_be_looked_up_alone(store: Store) -> None:
    job, _ = store.submit({}, "n", uid="a", at=1.0, status={}, key="k", digest="d")
    assert store.submitted("k", "d", 2.0) == job
    assert store.submitted("other", "d", 2.0) is None
    assert store.submitted("k", "d", 1.0 + KEY_KEPT_S) is None
    with pytest.raises(Conflict, match="job a"):
        store.submitted("k", "other", 2.0)


def test_one_key_from_many_threads_makes_one_job(store: Store) -> None:
    def submit(number: int) -> tuple[str, bool]:
        job, created = store.submit({}, "n", uid=f"u{number}", at=1.0, status={}, key="k", digest="d")
        return job.uid, created

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(submit, range(16)))
    assert sum(created for _, created in answers) == 1
    assert len({uid for uid, _ in answers}) == len(store.jobs()) == 1


def test_processes_that_make_the_store_and_submit_at_once_agree(tmp_path: Path, children) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    line = "print(store.submit({{}}, 'n', uid='{}', at=1.0, status={{}}, key='k', digest='d')[0].uid)"
    answers = children(url, line.format("a"), line.format("b"))
    store = Store.open(url, migrate=False)
    assert [[job.uid] * 2 for job in store.jobs()] == [answers]  # and this process sees what they committed
    store.close()


def test_pages_keep_their_place_while_jobs_are_added(store: Store, submit) -> None:
    for uid in "abcde":
        submit(uid)
    first = store.jobs(limit=2)
    submit("f")
    second = store.jobs(after=first[-1].seq, limit=2)
    submit("g")
    third = store.jobs(after=second[-1].seq, limit=2)
    assert [job.uid for page in (first, second, third) for job in page] == ["e", "d", "c", "b", "a"]
    assert [job.uid for job in store.jobs(limit=2)] == ["g", "f"]


def test_pages_of_one_phase(store: Store, submit) -> None:
    for uid in "abc":
        submit(uid)
    store.commit(store.acquire("me", 60), ended("b"))
    assert [job.uid for job in store.jobs(Which(("queued",)))] == ["c", "a"]
    assert [job.uid for job in store.jobs(Which(("succeeded",)))] == ["b"]
    assert [job.uid for job in store.jobs(Which(("queued", "succeeded")), oldest=True)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("which", "found"),
    [
        (Which(name="run-1"), "a"),
        (Which(name="run-*"), "ba"),
        (Which(name="*"), "dcba"),
        (Which(name="run"), ""),
        (Which(labels={"team": "nlp"}), "ca"),
        (Which(labels={"team": None}), "cba"),
        (Which(labels={"team": "nlp", "tier": "0"}), "c"),
        (Which(("queued",), "run-*", {"team": "vision"}), "b"),
    ],
)
def test_jobs_are_found_by_name_and_labels(store: Store, which: Which, found: str) -> None:
    rows: list[tuple[str, str, dict[str, str]]] = [
        ("a", "run-1", {"team": "nlp"}),
        ("b", "run-2", {"team": "vision"}),
        ("c", "other", {"team": "nlp", "tier": "0"}),
        ("d", "rum", {}),
    ]
    for uid, name, labels in rows:
        store.submit({"labels": labels}, name, uid=uid, at=1.0, status={})
    assert "".join(job.uid for job in store.jobs(which)) == found
    seq = store.job(found[0]).seq if found else 0
    assert "".join(job.uid for job in store.jobs(which, after=seq)) == found[1:]


def test_events_are_read_on_from_a_cursor(store: Store, submit) -> None:
    submit("a")
    submit("b")
    epoch = store.acquire("me", 60)
    first = store.events(None, after=0)
    store.commit(epoch, Changes(events=[("a", 2.0, "GangStarted", "2 ranks", {"attempt": 1}), ("b", 2.0, "X", "", {})]))
    assert [event.id for event in store.events(None, after=0)] == [1, 2, 3, 4]
    assert [event.job for event in store.events(None, after=first[-1].id)] == ["a", "b"]
    assert [event.data for event in store.events("a", after=1)] == [{"attempt": 1}]
    assert [event.id for event in store.events(None, after=1, limit=2)] == [2, 3]


def test_ids_are_seen_in_order_by_one_who_reads_while_others_write(store: Store) -> None:
    def submit(number: int) -> None:
        store.submit({}, "n", uid=f"u{number}", at=1.0, status={})

    seen: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(submit, number) for number in range(8)]
        while len(seen) < len(writes):
            seen += [job.seq for job, _ in store.unseen_jobs(seen[-1] if seen else 0)]
            failed = [write for write in writes if write.done() and write.exception()]
            assert not failed
    assert seen == sorted(seen)


def test_a_cancel_is_one_intent_however_often_it_is_asked(store: Store, submit) -> None:
    submit("a")
    for at in (2.0, 3.0):
        store.cancel("a", at)
    (intent,) = store.intents()
    assert (intent.job, intent.kind, intent.at) == ("a", "cancel", 2.0)
    assert store.job("a").cancel_requested
    store.commit(store.acquire("me", 60), Changes(intents_done=[intent.id]))
    assert store.intents() == []


def test_a_job_that_has_ended_takes_no_cancel(store: Store, submit) -> None:
    submit("a")
    store.commit(store.acquire("me", 60), ended("a"))
    store.cancel("a", 6.0)
    assert store.intents() == []
    assert not store.job("a").cancel_requested


def test_the_same_wish_is_one_intent_until_it_is_done(store: Store, submit) -> None:
    submit("a")
    submit("b")
    epoch = store.acquire("me", 60)
    store.commit(epoch, ended("b"))
    for job, kind, step in [
        ("a", "verify", 4),
        ("a", "verify", 8),
        ("a", "verify", 4),
        ("a", "restore", 4),
        ("b", "verify", 4),
    ]:
        store.request(job, kind, {"step": step}, 2.0)
    found = store.intents()
    assert [(one.job, one.kind, one.data) for one in found] == [
        ("a", "verify", {"step": 4}),
        ("a", "verify", {"step": 8}),
        ("a", "restore", {"step": 4}),
        ("b", "verify", {"step": 4}),  # also of a job that has ended
    ]
    store.commit(epoch, Changes(intents_done=[found[0].id]))
    store.request("a", "verify", {"step": 4}, 3.0)
    assert [(one.job, one.data["step"], one.at) for one in store.intents(taken=[one.id for one in found])] == [
        ("a", 4, 3.0)
    ]


def test_what_is_taken_up_holds_up_no_other_intent(store: Store, submit) -> None:
    submit("a")
    for step in range(5):
        store.request("a", "verify", {"step": step}, 1.0)
    first = store.intents(limit=3)
    assert [one.data["step"] for one in store.intents(limit=3, taken={one.id for one in first})] == [3, 4]


def test_the_newest_event_of_a_job(store: Store, submit) -> None:
    submit("a")
    submit("b")
    store.commit(store.acquire("me", 60), Changes(events=[("a", 2.0, "X", "", {})]))
    assert [store.last_event(uid) for uid in "abz"] == [3, 2, 0]


def test_a_job_tells_where_it_comes_from(store: Store) -> None:
    store.submit({}, "n", uid="a", at=1.0, status={}, origin=", to begin at step 4 of b")
    assert store.events("a", 0)[0].reason == "job n was submitted, to begin at step 4 of b"


def test_unknown_jobs(store: Store) -> None:
    with pytest.raises(NotFound, match="no job x"):
        store.job("x")
    with pytest.raises(NotFound, match="no job x"):
        store.cancel("x", 1.0)
    with pytest.raises(NotFound, match="no job x"):
        store.request("x", "verify", {}, 1.0)


def test_a_new_controller_finds_its_jobs(store: Store, submit) -> None:
    for uid in "abc":
        submit(uid)
    core = {"step": 4, "loss": float("nan")}
    running = JobUpdate("b", "running", "all well", {"attempt": 1}, core)
    store.commit(store.acquire("me", 60), Changes(jobs=[*ended("a").jobs, running]))
    assert [(job.uid, job.phase, state) for job, state in store.unfinished()] == [
        ("b", "running", {"step": 4, "loss": None}),
        ("c", "queued", None),
    ]
    for after in (2, 0):  # a controller that knows of none asks for all: not for what was handled, nor for what is over
        assert [(job.uid, state) for job, state in store.unseen_jobs(after)] == [("c", None)]
    job = store.job("a")
    assert (job.reason, job.status, job.ended_at) == ("done", {"attempt": 1}, 5.0)
    assert job.updated_at > job.created_at
