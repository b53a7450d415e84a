"""JSON merge patch (RFC 7396) on a job's spec. Knows no fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(whole: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`whole` with what `patch` names: null removes a field, mappings are merged. No deeper than `whole` goes."""
    made = dict(whole)
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(made.get(name), Mapping):
            made[name] = merged(made[name], value)
        else:
            made[name] = value
    return made
