"""What a job has measured: the figures of each step."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from api.door import Given, Uid
from api.views import MetricsPage, StepView

router = APIRouter(prefix="/v1/jobs/{uid:word}", tags=["figures"])


@router.get("/metrics")
def metrics(
    given: Given,
    uid: Uid,
    after_step: Annotated[int, Query(ge=0, lt=2**53)] = 0,
    limit: Annotated[int, Query(ge=1, le=5000)] = 5000,
    max_points: Annotated[int | None, Query(ge=1, le=5000, description="all steps, in so many rows at most")] = None,
) -> MetricsPage:
    """One row a step, as the attempt that did it last measured it. What is not finite is null. With `max_points` one a
    span of steps: the last of them, with the least and the greatest loss of all, and how many they are."""
    given.store.job(uid)
    if max_points is not None:
        rows = given.store.sampled(uid, max_points, after_step)
    else:
        rows = given.store.metrics(uid, after_step, limit)
    steps = tuple(StepView(**{**row.values, "step": row.step, "attempt": row.attempt, "at": row.at}) for row in rows)
    return MetricsPage(steps=steps, after_step=steps[-1].step if steps else after_step)
