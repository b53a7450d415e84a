"""What goes on in a job: its events and its log, as pages or as streams."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from starlette.concurrency import run_in_threadpool

from api import feeds, following, jobview, sse
from api.door import Given, News, Uid
from api.views import EventsPage, Level, LogsPage, Problem

router = APIRouter(prefix="/v1/jobs/{uid:word}", tags=["streams"])

ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "a page; or with follow, or an Accept that asks for it, a stream: server-sent events whose ids "
        "are cursors, or lines of JSON that have a cursor each",
        "content": {kind: {"schema": {"type": "string"}} for kind in ("text/event-stream", sse.LINES)},
    },
    404: {"model": Problem, "description": "there is no such job"},
    422: {"model": Problem, "description": "what is wrong, and what would work"},
}

Limit = Annotated[int, Query(ge=1, le=5000, description="of a page")]
Number = Annotated[int | None, Query(ge=0, lt=2**31)]
Follow = Annotated[bool, Query(description="stream until the job is over")]
Since = Annotated[float, Query(ge=0, le=1e12, description="Unix seconds: nothing from before")]
Accept = Annotated[str | None, Header()]


@router.get("/events", response_model=EventsPage, responses=ANSWERS)
async def events(
    given: Given,
    news: News,
    uid: Uid,
    after: Annotated[str, Query(pattern=feeds.EVENT_CURSOR)] = "0",
    follow: Follow = False,
    type: Annotated[list[str], Query(max_length=32, description="only these")] = [],  # noqa: B006
    since: Since = 0.0,
    limit: Limit = 500,
    accept: Accept = None,
    last_event_id: Annotated[str, Header(alias="Last-Event-ID", pattern=f"^$|{feeds.EVENT_CURSOR}")] = "",
) -> EventsPage | Response:
    """What happened to the job and why, oldest first, after the event `after`. `Last-Event-ID` goes before that."""
    await run_in_threadpool(given.store.job, uid)
    read, cursor = feeds.events(given.store, uid, type, since), last_event_id or after
    if kind := sse.wanted(accept, follow):
        feeds.event_cursor(cursor)
        fast = None if type or since else partial(news.events, uid)
        return sse.response(kind, following.items(given.store, news, uid, read, cursor, follow, fast))
    batch = await run_in_threadpool(read, cursor, limit)
    return EventsPage.model_validate({"events": [item for _, item in batch.items], "after": batch.position})


@router.get("/logs", response_model=LogsPage, responses=ANSWERS)
async def logs(
    given: Given,
    news: News,
    uid: Uid,
    after: Annotated[str, Query(pattern=feeds.LOG_CURSOR)] = "0:0",
    follow: Follow = False,
    rank: Number = None,
    attempt: Number = None,
    level: Annotated[Level, Query(description="and above")] = "debug",
    since: Since = 0.0,
    limit: Limit = 1000,
    accept: Accept = None,
    last_event_id: Annotated[str, Header(alias="Last-Event-ID", pattern=f"^$|{feeds.LOG_CURSOR}")] = "",
) -> LogsPage | Response:
    """What the ranks wrote, in the order in which it reached storage, after the line `after`."""
    row = await run_in_threadpool(given.store.job, uid)
    wanted = feeds.Lines(attempt, rank, level, since)
    read, cursor = feeds.logs(given.store, uid, jobview.folder(row, given.storage_root), wanted), last_event_id or after
    if kind := sse.wanted(accept, follow):
        feeds.log_cursor(cursor)
        return sse.response(kind, following.items(given.store, news, uid, read, cursor, follow))
    batch = await run_in_threadpool(read, cursor, limit)
    return LogsPage.model_validate({"lines": [item for _, item in batch.items], "after": batch.position})
