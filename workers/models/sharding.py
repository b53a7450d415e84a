"""How a model is cut, as data: which dimension of which parameter on which axis. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Axis = Literal["tp", "ep"]
Rules = Mapping[str, tuple[Axis, int | None]]
"""By the last two parts of a parameter's name: axis and dimension. None: whole on every rank, and used between `enter`
and `leave`, where a rank sees a part of its gradient. What has no rule is whole on every rank of both axes."""


def dimension(rules: Rules, name: str, axis: Axis) -> int | None:
    """The dimension of the parameter called `name` that `axis` cuts."""
    cut_by, dim = _rule(rules, name)
    return dim if cut_by == axis else None


def shared(rules: Rules, name: str, axis: Axis) -> bool:
    """Whether each rank of `axis` has it whole and sees a part of its gradient."""
    return _rule(rules, name) == (axis, None)


def of_another(rules: Rules, name: str, axis: Axis) -> bool:
    """Whether it is another axis's to cut."""
    return _rule(rules, name)[0] not in (None, axis)


def _rule(rules: Rules, name: str) -> tuple[Axis | None, int | None]:
    return rules.get(".".join(name.split(".")[-2:]), (None, None))


def sliced(rules: Rules, name: str) -> int:
    """The dimension along which a checkpoint stores it in tiles, so that a tp slice is a run of whole ones."""
    return dimension(rules, name, "tp") or 0
