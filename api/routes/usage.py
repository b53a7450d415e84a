"""What was used, by whom: slot-hours, tokens, goodput, and at a price what that costs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from api.door import Asking, Given
from api.views import Usage, UsageView
from service.store.records import UsageRow

router = APIRouter(prefix="/v1/usage", tags=["usage"])

HOUR_S = 3600.0
Time = Annotated[float, Query(ge=0, le=1e12, description="Unix seconds")]


@router.get("")
def usage(
    given: Given,
    asking: Asking,
    since: Time = 0.0,
    until: Time = 1e12,
    price: Annotated[float | None, Query(ge=0, le=1e6, description="of a slot-hour, in any currency")] = None,
) -> Usage:
    """Of jobs that were submitted in between, by project and queue; of the token's project, or of all."""
    return Usage(entries=tuple(_entry(row, price) for row in given.store.usage(asking.project, since, until)))


def _entry(row: UsageRow, price: float | None) -> UsageView:
    hours = row.slot_s / HOUR_S
    return UsageView(
        project=row.project,
        queue=row.queue,
        jobs=row.jobs,
        slot_hours=hours,
        lost_slot_hours={cause: lost / HOUR_S for cause, lost in row.lost_slot_s.items() if lost},
        tokens=row.tokens,
        goodput=min(1.0, row.productive_s / row.elapsed_s) if row.elapsed_s > 0 else 0.0,
        cost=None if price is None else hours * price,
    )
