"""A job to a JSON value and back, for the store.

Fields added later read as their defaults; unknown ones are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from service.core.state import Job

_JOB = TypeAdapter(Job)


def dump(job: Job) -> dict[str, Any]:
    value: dict[str, Any] = _JOB.dump_python(job, mode="json")
    return value


def load(value: Mapping[str, Any]) -> Job:
    """ValidationError when the value is no job of any version."""
    return _JOB.validate_python(value)
