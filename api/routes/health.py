"""Is the process alive, and can it serve: for load balancers and Kubernetes, without a token."""

from __future__ import annotations

import logging

from fastapi import APIRouter

from api.door import Given, News
from api.views import Health
from service.contracts import errors

log = logging.getLogger("phalanx.api")

router = APIRouter(tags=["health"])


@router.get("/healthz")
def alive() -> Health:
    return Health()


@router.get("/readyz", responses={503: {"description": "the store can't be reached, or the process is about to end"}})
def ready(given: Given, news: News) -> Health:
    if news.closing:
        raise errors.ClusterError("this process is about to end", hint="another one answers")
    try:
        given.store.ping()
    except errors.StoreUnavailable as error:  # why is for the log: anyone may ask here
        log.warning("not ready", extra={"data": {"error": error.message, "hint": error.hint}})
        raise errors.StoreUnavailable("the store can't be reached", hint="the API's log says why") from error
    return Health()
