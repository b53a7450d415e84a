"""Errors as people and programs see them: RFC 9457 documents. Knows status codes; no route, no store."""

from __future__ import annotations

import http
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from api.views import Problem
from service.contracts import errors

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 2

STATUS: tuple[tuple[type[errors.PhalanxError], int, Mapping[str, str]], ...] = (
    (errors.NotFound, 404, {}),
    (errors.Conflict, 409, {}),
    (errors.Changed, 412, {}),
    (errors.Unconditional, 428, {}),
    (errors.Unauthorized, 401, {"WWW-Authenticate": 'Bearer realm="phalanx"'}),
    (errors.Forbidden, 403, {}),
    (errors.TooMany, 429, {}),
    (errors.UserError, 422, {}),
    (errors.ClusterError, 503, {"Retry-After": str(RETRY_AFTER_S)}),
    (errors.PhalanxError, 500, {}),
)
"""The first row that an error is an instance of is its answer."""

REASONS = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}
"""Published codes of what the framework refuses before a route is asked."""


def answer(error: errors.PhalanxError) -> JSONResponse:
    status, headers = next((status, headers) for kind, status, headers in STATUS if isinstance(error, kind))
    return problem(status, error.message, error.code, error.hint, error.field, headers)


def problem(
    status: int,
    detail: str,
    reason: str,
    hint: str = "",
    field: str = "",
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    body = Problem(
        type=f"urn:phalanx:error:{reason}",
        title=http.HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        reason=reason,
        hint=hint,
        field=field,
    )
    return JSONResponse(body.model_dump(), status, dict(headers or {}), media_type=MEDIA_TYPE)


def internal() -> JSONResponse:
    """The answer to an error that nobody foresaw: nothing of the inside is told."""
    return problem(500, "the API failed on this request; its log says why under X-Request-Id", "internal")


def install(app: FastAPI) -> None:
    app.add_exception_handler(errors.PhalanxError, _phalanx)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)


async def _phalanx(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, errors.PhalanxError)
    return answer(error)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    reason = REASONS.get(error.status_code, "invalid")
    detail = f"{request.method} {request.url.path}: {error.detail}"
    headers = dict(error.headers or {})
    if error.status_code == 405 and (methods := _methods(request.app.openapi()["paths"], request.url.path)):
        headers["Allow"] = ", ".join(methods)
    return problem(error.status_code, detail, reason, headers=headers)


def _methods(paths: Mapping[str, Mapping[str, Any]], path: str) -> list[str]:
    """Of all routes of the path: the framework names those of the first."""
    found = {
        method.upper()
        for template, operations in paths.items()
        if re.fullmatch(re.sub(r"\\{\w+\\}", "[^/:]+", re.escape(template)), path)
        for method in operations
    }
    return sorted(found)


async def _validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    items = error.errors()
    if items[0]["type"] == "json_invalid":
        return problem(400, f"the body is not JSON: {items[0]['ctx']['error']}", "invalid", field="body")
    sentences = [f"{_field(item)}: {item['msg']}" for item in items]
    return problem(422, sentences[0], "invalid", "; ".join(sentences[1:4]), _field(items[0]))


def _field(item: Mapping[str, Any]) -> str:
    place, *rest = item["loc"]
    named = rest[:1] if place == "query" else rest  # of a parameter that may come several times, the name
    return ".".join(str(part) for part in named) or str(place)
