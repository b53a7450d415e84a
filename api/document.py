"""The OpenAPI document as the API answers: problems have a content type of their own, some come from every route."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api import errors as problems
from api import examples
from api.auth import OPEN_PATHS

PROBLEM = {"$ref": "#/components/schemas/Problem"}
EVERYWHERE = {
    "400": "the body is not JSON",
    "401": "no token, or one that opens nothing",
    "403": "the token may not do this",
    "404": "there is no such thing, or it is of another project",
    "405": "not for this path; Allow says which methods are",
    "413": "the body is too large",
    "422": "what is wrong, and what would work",
    "429": "too many requests; Retry-After says when to come back",
    "503": "the store can't be reached; Retry-After says when to come back",
}


def install(app: FastAPI) -> None:
    """`app.openapi()` gives it from now on."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = made(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def made(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=__doc__ or "")
    document["info"]["description"] = "Jobs, their streams and checkpoints, the fleet, queues, projects and tokens."
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            if "requestBody" in operation:
                operation["requestBody"]["content"]["application/json"]["example"] = examples.BODIES[verb, path]
            if path not in OPEN_PATHS:
                operation["security"] = [{"token": []}]
            _answers(operation["responses"])
    return document


def _answers(responses: dict[str, Any]) -> None:
    for code, what in EVERYWHERE.items():
        responses.setdefault(code, {"description": what})
    for code, answer in responses.items():
        if code.startswith(("4", "5")):
            answer["content"] = {problems.MEDIA_TYPE: {"schema": PROBLEM}}
