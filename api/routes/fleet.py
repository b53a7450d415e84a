"""The nodes, as the controller last saw them."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated, Any

from fastapi import APIRouter, Path

from api import checks
from api.door import Given
from api.views import Nodes, NodeView, Problem
from service.core import codec, health

router = APIRouter(prefix="/v1", tags=["fleet"])

NO_NODE: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "there is no such node"}}


@router.get("/nodes")
def nodes(given: Given) -> Nodes:
    rows, held, now = given.store.nodes(), codec.load_health(given.store.health()), time.time()
    barred = {node.id: health.bar(node, held, now) for node in checks.fleet(rows).nodes}
    return Nodes(nodes=tuple(NodeView(**dataclasses.asdict(row), barred=barred[row.id]) for row in rows))


@router.post("/nodes/{name:word}:forgive", status_code=202, responses=NO_NODE)
def forgive(given: Given, name: Annotated[str, Path(max_length=253)]) -> None:
    """Nothing is held against the node any more: it is placed on again."""
    given.store.forgive(name, time.time())
