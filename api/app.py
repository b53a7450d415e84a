"""The API as an ASGI application. Built from what it is given; reads neither environment nor files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from importlib import metadata

from fastapi import FastAPI

from api import access, auth, bodies, document, errors, words  # noqa: F401  # words: paths are written with it
from api.door import Door
from api.hub import Hub
from api.oidc import Issuer
from api.routes import (
    checkpoints,
    details,
    figures,
    fleet,
    health,
    hooks,
    jobs,
    plan,
    projects,
    queues,
    rescale,
    streams,
    tokens,
    usage,
    wishes,
)
from api.rules import Rules
from api.tokens import Keys
from service.store.jobs import Store

log = logging.getLogger("phalanx.api")


def create_app(store: Store, token: str, storage_root: str, rules: Rules = Rules()) -> FastAPI:  # frozen
    """The caller closes the store."""
    app = FastAPI(
        title="Phalanx",
        version=metadata.version("phalanx"),
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.door = Door(store, storage_root, rules)
    errors.install(app)
    about_jobs = (jobs, wishes, rescale, streams, figures, details, checkpoints)
    for routes in (health, *about_jobs, fleet, plan, queues, usage, projects, tokens, hooks):
        app.include_router(routes.router)
    document.install(app)
    app.add_middleware(bodies.Bounded)  # added last is asked first
    keys = Keys(store.access, token, issuer=Issuer(rules.trust) if rules.trust else None)
    app.add_middleware(auth.Bearer, keys=keys, per_s=rules.per_s)
    app.add_middleware(access.Access)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.hub = Hub(app.state.door.store)  # of this event loop
    log.info("started", extra={"data": {"version": app.version}})
    yield
    app.state.hub.close()
    log.info("stopped")
