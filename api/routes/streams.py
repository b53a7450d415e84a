"""What goes on in a job: its events and its log, as pages or as streams of server-sent events."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from starlette.concurrency import run_in_threadpool

from api import feeds, jobview, sse
from api.door import Given, Uid
from api.views import EventsPage, LogsPage, Problem

router = APIRouter(prefix="/v1/jobs/{uid}", tags=["streams"])

ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "a page; or with follow, or Accept: text/event-stream, a stream whose ids are cursors",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    404: {"model": Problem, "description": "there is no such job"},
    422: {"model": Problem, "description": "what is wrong, and what would work"},
}

Limit = Annotated[int, Query(ge=1, le=5000, description="of a page")]
Number = Annotated[int | None, Query(ge=0, lt=2**31)]
Follow = Annotated[bool, Query(description="stream until the job is over")]
Resumed = Annotated[str | None, Header(alias="Last-Event-ID", description="goes before `after`")]


@router.get("/events", response_model=EventsPage, responses=ANSWERS)
async def events(
    given: Given,
    uid: Uid,
    after: str = "0",
    follow: Follow = False,
    limit: Limit = 500,
    accept: Annotated[str | None, Header()] = None,
    last_event_id: Resumed = None,
) -> EventsPage | Response:
    """What happened to the job and why, oldest first, after the event `after`."""
    await run_in_threadpool(given.store.job, uid)
    read, cursor = feeds.events(given.store, uid), last_event_id or after
    if sse.wanted(accept, follow):
        feeds.event_cursor(cursor)
        return sse.response(given.store, uid, read, cursor, follow)
    batch = await run_in_threadpool(read, cursor, limit)
    return EventsPage.model_validate({"events": [item for _, item in batch.items], "after": batch.position})


@router.get("/logs", response_model=LogsPage, responses=ANSWERS)
async def logs(
    given: Given,
    uid: Uid,
    after: str = "0:0",
    follow: Follow = False,
    rank: Number = None,
    attempt: Number = None,
    limit: Limit = 1000,
    accept: Annotated[str | None, Header()] = None,
    last_event_id: Resumed = None,
) -> LogsPage | Response:
    """What the ranks wrote, in the order in which it reached storage, after the line `after`."""
    row = await run_in_threadpool(given.store.job, uid)
    read = feeds.logs(given.store, uid, jobview.folder(row, given.storage_root), attempt, rank)
    cursor = last_event_id or after
    if sse.wanted(accept, follow):
        feeds.log_cursor(cursor)
        return sse.response(given.store, uid, read, cursor, follow)
    batch = await run_in_threadpool(read, cursor, limit)
    return LogsPage.model_validate({"lines": [item for _, item in batch.items], "after": batch.position})
