"""The global order: each sample once an epoch, the same for every layout, and never another in a later version."""

from __future__ import annotations

import numpy as np
import pytest

from workers.data import order

SEEDS = (0, 1, 7, 2**63 - 1)
EPOCHS = 3


@pytest.mark.parametrize("seed", SEEDS)
def test_an_epoch_has_each_sample_once(seed: int) -> None:
    for size in (*range(1, 66), 127, 128, 129, 255, 256, 257, 300):
        epochs = order.samples(seed, 0, EPOCHS * size, size).reshape(EPOCHS, size)
        assert (np.sort(epochs) == np.arange(size)).all(), size


@pytest.mark.parametrize("size", [40, 64, 257, 1000])
def test_epochs_and_seeds_have_their_own_order(size: int) -> None:
    orders = [order.samples(seed, epoch * size, size, size) for seed in SEEDS for epoch in range(EPOCHS)]
    orders.append(np.arange(size))
    assert len({tuple(one) for one in orders}) == len(orders)


@pytest.mark.parametrize(
    ("seed", "cursor", "size", "ids"),
    [
        (7, 0, 1000, [36, 142, 997, 125, 641, 513]),
        (7, 1000, 1000, [656, 929, 412, 290, 140, 790]),
        (0, 10**12, 12345, [7607, 7169, 1835, 1368, 7439, 663]),
    ],
)
def test_the_order_is_for_good(seed: int, cursor: int, size: int, ids: list[int]) -> None:
    """Another order would train samples twice, and others never, in every run that continues."""
    assert order.samples(seed, cursor, 6, size).tolist() == ids


@pytest.mark.parametrize("size", [5, 12, 100])
@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6])
def test_any_number_of_replicas_slices_the_same_order(size: int, dp: int) -> None:
    batch, steps = 12, 20  # 240 samples: every size ends an epoch inside a batch
    share = batch // dp
    windows = [order.samples(3, step * batch + r * share, share, size) for step in range(steps) for r in range(dp)]
    assert np.concatenate(windows).tolist() == order.samples(3, 0, batch * steps, size).tolist()


def test_a_window_over_the_end_of_an_epoch() -> None:
    first, second = order.samples(9, 0, 10, 10), order.samples(9, 10, 10, 10)
    assert order.samples(9, 7, 6, 10).tolist() == [*first[7:], *second[:3]]


def test_a_window_longer_than_an_epoch() -> None:
    assert np.bincount(order.samples(9, 0, 35, 10), minlength=10).sum() == 35
    assert set(np.bincount(order.samples(9, 0, 35, 10))) == {3, 4}


def test_a_corpus_of_any_size_needs_no_table() -> None:
    ids = order.samples(1, 2**50, 4096, 2**45 + 3)
    assert len(set(ids.tolist())) == 4096
    assert ids.min() >= 0
    assert ids.max() < 2**45 + 3


def test_every_place_is_as_likely() -> None:
    """Where sample 0 goes over 4,000 seeds; 10 bins: chi-square with 9 degrees of freedom, 27.9 at p = 0.001."""
    first = [int(order.samples(seed, 0, 1, 10)[0]) for seed in range(4000)]
    counts = np.bincount(first, minlength=10)
    assert ((counts - 400) ** 2 / 400).sum() < 27.9
