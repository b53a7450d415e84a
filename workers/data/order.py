"""The global order: sample i of epoch e is a pure function of (seed, e, i). No state, no table, any size.

A Feistel network over the smallest power-of-four domain, walked until it lands inside (cycle walking; Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6
MIX = np.uint64(0x9E3779B97F4A7C15)


def samples(seed: int, cursor: int, count: int, size: int) -> np.ndarray:
    """Ids [count], each in [0, size), of the samples number `cursor` to `cursor + count` since the run began."""
    return at(seed, np.arange(cursor, cursor + count, dtype=np.uint64), size)


def at(seed: int, positions: np.ndarray, size: int) -> np.ndarray:
    """Ids in [0, size) of the samples with these numbers, uint64 of any shape -> int64 of the same."""
    epoch, index = positions // np.uint64(size), positions % np.uint64(size)
    return permuted(seed, epoch, index, size).astype(np.int64)


def permuted(seed: int, epoch: np.ndarray, index: np.ndarray, size: int) -> np.ndarray:
    """Where `index` goes in the permutation of [0, size) that belongs to (seed, epoch)."""
    half = np.uint64(max(1, (int(size - 1).bit_length() + 1) // 2))
    with np.errstate(over="ignore"):  # arithmetic is modulo 2^64
        keys = [_mixed(_mixed(np.uint64(seed) + np.uint64(number) * MIX) ^ epoch) for number in range(1, ROUNDS + 1)]
        result = _rounds(index, keys, half)
        while (outside := result >= size).any():
            result[outside] = _rounds(result[outside], [key[outside] for key in keys], half)
    return result


def _rounds(value: np.ndarray, keys: list[np.ndarray], half: np.uint64) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << half) | right


def _mixed(value: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
