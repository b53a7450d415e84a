"""What of a model is not trained: by the patterns of `train.freeze`. Knows names only."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence

from torch import nn


def apply(model: nn.Module, patterns: Sequence[str]) -> None:
    """Parameters whose name matches keep their values."""
    for name, parameter in model.named_parameters():
        if matches(name, patterns):
            parameter.requires_grad_(False)


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check(names: Collection[str], patterns: Sequence[str]) -> None:
    """ValueError: a pattern that no parameter of the whole model has, or nothing is left to train."""
    for pattern in patterns:
        if not any(matches(name, (pattern,)) for name in names):
            some = ", ".join(sorted(names)[:3])
            raise ValueError(f"train.freeze: no parameter is called {pattern}; names are as {some}; * stands for any")
    if patterns and all(matches(name, patterns) for name in names):
        raise ValueError(f"train.freeze: {', '.join(patterns)} leaves nothing to train")
