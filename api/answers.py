"""A view as an answer, made to JSON once: the framework would check it again, and make it to JSON in Python."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel
from starlette.responses import Response


def told(view: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(view.model_dump_json(), status, headers, media_type="application/json")
