"""Which jobs are meant, as conditions of a query. Each can be answered by an index in the order of submission."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from service.store import models
from service.store.records import Which

LAST = "\U0010ffff"  # no name goes on behind it


def conditions(which: Which) -> Iterator[sa.ColumnElement[bool]]:
    job = models.jobs.c
    if which.project is not None:
        yield job.project == which.project
    if which.phases:
        yield job.phase.in_(which.phases)
    if which.name.endswith("*"):
        begin = which.name.removesuffix("*")
        yield job.name.between(begin, begin + LAST)
    elif which.name:
        yield job.name == which.name
    for key, value in which.labels.items():
        label = models.job_labels.c
        named = sa.select(label.seq).where(label.key == key)
        yield job.seq.in_(named if value is None else named.where(label.value == value))
