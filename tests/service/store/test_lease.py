from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.contracts.errors import Fenced
from service.store.jobs import Store
from service.store.records import Changes, JobUpdate, MetricRow


def acquired_by(store: Store, holder: str, deadline_s: float = 10.0) -> int:
    """The epoch, once the lease is free."""
    deadline = time.monotonic() + deadline_s
    while (epoch := store.acquire(holder, 60)) is None:
        assert time.monotonic() < deadline, "the lease never expired"
    return epoch


def test_a_held_lease_is_refused_to_others(store: Store) -> None:
    assert store.acquire("one", 60) == 1
    assert store.acquire("two", 60) is None
    assert store.acquire("one", 60) == 1
    assert not store.renew("two", 1, 60)
    assert not store.renew("one", 2, 60)
    assert store.renew("one", 1, 60)


def test_the_epoch_grows_with_every_change_of_hands(store: Store) -> None:
    epochs = []
    for holder in ("one", "two", "one"):
        epoch = store.acquire(holder, 60)
        assert epoch is not None
        epochs.append(epoch)
        store.release(holder, epoch)
    assert epochs == [1, 2, 3]


def test_an_expired_lease_goes_to_the_next_and_not_back(store: Store) -> None:
    assert store.acquire("one", 0.05) == 1
    assert acquired_by(store, "two") == 2
    assert not store.renew("one", 1, 60)
    assert store.acquire("one", 60) is None
    store.release("one", 1)
    assert store.renew("two", 2, 60)


def test_renewing_pushes_the_expiry_away(store: Store) -> None:
    assert store.acquire("one", 0.05) == 1
    assert store.renew("one", 1, 60)
    pause = time.monotonic() + 0.1
    while time.monotonic() < pause:
        assert store.acquire("two", 60) is None


def test_an_expired_lease_that_nobody_took_is_still_its_holders(store: Store) -> None:
    assert store.acquire("one", -1) == 1
    store.commit(1, Changes())
    assert store.renew("one", 1, -1)
    assert store.acquire("one", 60) == 1


def test_a_fenced_commit_writes_nothing(store: Store, submit) -> None:
    submit("a")
    changes = Changes(
        jobs=[JobUpdate("a", "failed", "", {}, {}, 2.0)],
        events=[("a", 2.0, "JobFailed", "", {})],
        metrics=[MetricRow("a", 1, 1, 2.0, {})],
    )
    before = store.job("a"), store.events(None, after=0)
    old = store.acquire("one", -1)
    new = store.acquire("two", 60)
    assert old is not None
    assert new is not None
    with pytest.raises(Fenced, match="epoch 2, held by two"):
        store.commit(old, changes)
    store.release("two", new)
    with pytest.raises(Fenced, match="released"):
        store.commit(new, changes)
    assert (store.job("a"), store.events(None, after=0), store.metrics("a", 0)) == (*before, [])


def test_of_many_who_want_it_one_gets_it(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        epochs = list(pool.map(lambda number: store.acquire(f"c{number}", 60), range(8)))
    assert sorted(epochs, key=str) == [1, *[None] * 7]
