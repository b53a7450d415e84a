"""A job, and what is held against nodes, to a JSON value and back, for the store.

Fields added later read as their defaults; unknown ones are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

from service.contracts.cluster import NodeHealth
from service.core.state import Job

_JOB = TypeAdapter(Job)
_HEALTH = TypeAdapter(NodeHealth)


def dump(job: Job) -> dict[str, Any]:
    value: dict[str, Any] = _JOB.dump_python(job, mode="json")
    return value


def load(value: Mapping[str, Any]) -> Job:
    """ValidationError when the value is no job of any version."""
    return _JOB.validate_python(value)


def dump_health(health: Mapping[str, NodeHealth]) -> dict[str, dict[str, Any]]:
    return {name: _HEALTH.dump_python(own, mode="json") for name, own in health.items()}


def load_health(value: Mapping[str, Any]) -> Mapping[str, NodeHealth]:
    return MappingProxyType({name: _HEALTH.validate_python(own) for name, own in value.items()})
